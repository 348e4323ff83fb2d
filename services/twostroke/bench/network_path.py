"""A network path that can be cut: a network namespace, and a pair of virtual interfaces between it and this one."""

from __future__ import annotations

import os
import subprocess

from twostroke.errors import UnavailableError


class NetworkPath:
    """Makes it; `remove` removes it.

    device: the end here. inside: a command prefix that runs a process at the other end, whose device is `inner` and
    whose IPv4 address is `inner_host`. Raises UnavailableError, with the reason, where the host does not allow it: it
    takes root, network namespaces and iproute2.
    """

    def __init__(self) -> None:
        high, low = os.urandom(2)
        self._namespace = f"twostroke-{high:02x}{low:02x}"
        self.device, self.inner = f"ts{high:02x}{low:02x}a", f"ts{high:02x}{low:02x}b"
        self.inside = ["ip", "netns", "exec", self._namespace]
        self._addresses = [
            (f"10.213.{high}.{(low & 0xFC) + end}/30", f"fd00:213:{high:x}:{low:x}::{end}/64") for end in (1, 2)
        ]
        self.inner_host = self._addresses[1][0].partition("/")[0]
        try:
            _run("ip", "netns", "add", self._namespace)
            self._connect()
        except UnavailableError:
            self.remove()
            raise

    def _connect(self) -> None:
        inside = ("-n", self._namespace)
        _run("ip", "link", "add", self.device, "type", "veth", "peer", "name", self.inner, "netns", self._namespace)
        for place, device, (ipv4, ipv6) in (
            ((), self.device, self._addresses[0]),
            (inside, self.inner, self._addresses[1]),
        ):
            _run("ip", *place, "addr", "add", ipv4, "dev", device)
            _run("ip", *place, "addr", "add", ipv6, "dev", device, "nodad")
            _run("ip", *place, "link", "set", device, "up")

    def cut(self) -> None:
        """No packet passes any more, and nobody is told."""
        _run("ip", "-n", self._namespace, "link", "set", self.inner, "down")

    def heal(self) -> None:
        """They pass again, over IPv4."""
        _run("ip", "-n", self._namespace, "link", "set", self.inner, "up")

    def replace(self) -> None:
        """Other interfaces of the same names and addresses, as for a container that is disconnected and connected."""
        _run("ip", "link", "del", self.device)
        self._connect()

    def remove(self) -> None:
        """With all that is in it."""
        subprocess.run(["ip", "netns", "del", self._namespace], check=False, capture_output=True)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UnavailableError(f"{' '.join(command)}: {reason.strip()}") from None
