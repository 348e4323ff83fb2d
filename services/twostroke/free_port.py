"""Ports for processes that are about to start."""

from __future__ import annotations

import errno
import secrets
import socket
from collections.abc import Container

CALM_PORTS = range(20000, 32000)


def free_port(host: str, taken: Container[int] = ()) -> int:
    """A port that is free now and stays so for the seconds until a process listens on it.

    It is taken from below the ports that the kernel gives to outgoing connections, since one of those may be gone by
    then. Raises OSError when the host is not one of this machine's addresses.
    """
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    while True:
        port = secrets.choice(CALM_PORTS)
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                continue
        if port not in taken:
            return port
