"""Finds workers: a static list of host:port, where a name may stand for several addresses that come and go."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resolution:
    """One look at all targets."""

    addresses: frozenset[str]
    """ "ip:port", IPv6 in brackets."""
    failures: tuple[str, ...]
    """One line per target that could not be resolved."""


async def resolve(targets: Sequence[str]) -> Resolution:
    """The addresses behind all targets. A target that cannot be resolved is a line, not an error."""
    addresses: set[str] = set()
    failures: list[str] = []
    for target in targets:
        try:
            addresses.update(await _lookup(target))
        except OSError as error:
            failures.append(f"cannot resolve {target}: {error.strerror or error}")
    return Resolution(frozenset(addresses), tuple(failures))


async def _lookup(target: str) -> set[str]:
    host, _, port = target.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    found = await asyncio.get_running_loop().getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    ips = {str(info[4][0]) for info in found}
    families = {ipaddress.ip_address(ip.partition("%")[0]).version for ip in ips}
    if families == {4, 6}:
        # A dual-stacked name is one worker at two addresses, not two workers.
        ips = {ip for ip in ips if ":" not in ip}
    return {f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips}
