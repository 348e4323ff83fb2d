"""Names that stand for several workers, and workers that come and go behind them."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import pytest

from twostroke.config import RouterSettings, load
from twostroke.router import pool as pool_module
from twostroke.router.discovery import Resolution, resolve
from twostroke.router.member import MemberState
from twostroke.router.pool import WorkerPool

Names = dict[str, list[str]]


@pytest.fixture
async def names(monkeypatch: pytest.MonkeyPatch) -> Names:
    """What the resolver knows; tests fill it."""
    known: Names = {}

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[tuple[Any, ...]]:
        if host not in known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in ip else socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, port))
            for ip in known[host]
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    return known


async def test_a_name_with_several_addresses_is_several_workers(names: Names) -> None:
    names.update({"decode": ["10.0.0.1", "10.0.0.2"], "10.0.0.9": ["10.0.0.9"]})
    found = await resolve(["decode:50061", "10.0.0.9:7001"])
    assert found.addresses == {"10.0.0.1:50061", "10.0.0.2:50061", "10.0.0.9:7001"}
    assert found.failures == ()


async def test_ipv6_addresses_are_bracketed(names: Names) -> None:
    names["::1"] = ["::1"]
    assert (await resolve(["[::1]:7001"])).addresses == {"[::1]:7001"}


async def test_a_dual_stacked_name_is_one_worker(names: Names) -> None:
    names["host"] = ["10.0.0.1", "fd00::1"]
    assert (await resolve(["host:7001"])).addresses == {"10.0.0.1:7001"}


async def test_a_name_that_is_not_known_is_told_and_does_not_hide_the_others(names: Names) -> None:
    names["prefill"] = ["10.0.0.1"]
    found = await resolve(["prefill:1", "decode:2"])
    assert found.addresses == {"10.0.0.1:1"}
    assert found.failures == ("cannot resolve decode:2: Name or service not known",)


class Rig:
    """A pool whose names resolve to what `answers` says, look by look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: Resolution) -> None:
        self._answers = list(answers)

        async def look(_: object) -> Resolution:
            return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]

        monkeypatch.setattr(pool_module, "resolve", look)
        settings = load(RouterSettings, workers="decode:1", resolve_interval_s=0.01)
        self.pool = WorkerPool(settings, "router", step_done=lambda: None)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.pool.wait_changed()

    def addresses(self) -> list[str]:
        return [member.address for member in self.pool.members]


async def test_the_pool_follows_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """O-71."""
    rig = Rig(
        monkeypatch,
        Resolution(frozenset({"127.0.0.1:1"}), ()),
        Resolution(frozenset({"127.0.0.1:1", "127.0.0.2:1"}), ()),
        Resolution(frozenset({"127.0.0.2:1"}), ()),
    )
    task = asyncio.create_task(rig.pool.run())
    await rig.until(lambda: rig.addresses() == ["127.0.0.2:1"])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_resolver_that_fails_takes_no_worker_away(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(
        monkeypatch,
        Resolution(frozenset({"127.0.0.1:1"}), ()),
        Resolution(frozenset(), ("cannot resolve decode:1: no",)),
    )
    task = asyncio.create_task(rig.pool.run())
    await rig.until(lambda: "cannot resolve decode:1: no" in rig.pool.waiting_for())
    assert rig.addresses() == ["127.0.0.1:1"]
    assert rig.pool.members[0].state is MemberState.UNREACHABLE
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
