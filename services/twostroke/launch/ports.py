"""Ports of this machine: which are free, who holds the others."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Sequence

import psutil

from twostroke.errors import ConfigError
from twostroke.free_port import free_port


def require_free(host: str, ports: Sequence[tuple[str, int]]) -> None:
    """Checks that every (flag, port) can be listened on; port 0 always can.

    Raises ConfigError naming each busy port, its holder where that can be seen, and the flag that changes it.
    """
    problems = []
    seen: dict[int, str] = {}
    for flag, port in ports:
        if port == 0:
            continue
        if port in seen:
            problems.append(f"{seen[port]} and {flag} are both {port}; choose another {flag}")
            continue
        seen[port] = flag
        try:
            with _bind(host, port):
                pass
        except OSError as error:
            problems.append(_explain(host, port, flag, error))
    if problems:
        raise ConfigError("; ".join(problems))


def pick_free(host: str, count: int, taken: Sequence[int] = ()) -> list[int]:
    """That many different free ports, none of them in `taken`.

    Raises ConfigError when the host is not one of this machine's addresses.
    """
    chosen: list[int] = []
    while len(chosen) < count:
        try:
            chosen.append(free_port(host, {*taken, *chosen}))
        except OSError as error:
            raise ConfigError(_explain(host, 0, "--host", error)) from error
    return chosen


def _bind(host: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A listener still makes this fail, a connection that is closing (TIME_WAIT) does not.
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen(1)
    except OSError:
        made.close()
        raise
    return made


def _explain(host: str, port: int, flag: str, error: OSError) -> str:
    if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
        return f"--host {host}: not an address of this machine"
    if error.errno == errno.EACCES:
        return f"port {port} needs privileges; choose one above 1023 with {flag}"
    holder = _holder(port)
    return f"port {port} is taken{f' by {holder}' if holder else ''}; choose another with {flag}"


def _holder(port: int) -> str:
    """Who listens there, as far as this user may see."""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    return ""
