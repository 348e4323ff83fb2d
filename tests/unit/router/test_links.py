"""A link takes traffic after a probe, loses it when it fails, and gets it back; its neighbours are not asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
import pytest_asyncio

from twostroke.errors import KvCorruptError, KvLostError, TwostrokeError, WorkerLostError
from twostroke.policy.breaker import BreakerSettings
from twostroke.policy.ledger import Life
from twostroke.router import links as module
from twostroke.router.links import Links, LinkState
from twostroke.router.member import Member
from twostroke.v1.kv_pb2 import KvEndpoint
from twostroke.v1.worker_pb2 import GetInfoResponse, ProbeLinkResponse

FOUND = ProbeLinkResponse(lanes=["rc_mlx5/mlx5_0:1"], rdma=True, bytes_per_s=5e9, latency_ms=0.01)
LOST = KvLostError("the hold is over")
FAILURES = module.BREAKER.failures


class Worker:
    """As much of a Member as a link needs. `answer` decides what probes from here find."""

    def __init__(self, name: str, *, probed: bool = True) -> None:
        self.address = name
        self.info = GetInfoResponse(worker_id=name, epoch=f"{name} 1")
        if probed:
            self.info.kv_endpoint.CopyFrom(KvEndpoint(addresses=[b"somewhere"]))
        self.probes: list[str] = []
        self.answer: Callable[[str], ProbeLinkResponse] = lambda _: FOUND
        self.gate = asyncio.Event()
        self.gate.set()

    @property
    def life(self) -> Life:
        return Life(self.address, self.info.worker_id, self.info.epoch)

    async def probe_link(self, source: GetInfoResponse) -> ProbeLinkResponse:
        self.probes.append(source.worker_id)
        await self.gate.wait()
        return self.answer(source.worker_id)


class Rig:
    """Links between some workers; `until` waits for a change that makes a condition true."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group = group
        self.changed = asyncio.Event()
        self.links = Links(self.changed.set)

    def follow(self, *pairs: tuple[Worker, Worker]) -> None:
        self.links.follow(self.group, cast("list[tuple[Member, Member]]", pairs))

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def states(self) -> dict[str, LinkState]:
        return {link.name: link.state for link in self.links}


class Tasks:
    """As much of a TaskGroup as links need."""

    def __init__(self) -> None:
        self.all: list[asyncio.Task[None]] = []

    def create_task(self, work: Coroutine[None, None, None], name: str) -> asyncio.Task[None]:
        self.all.append(asyncio.get_running_loop().create_task(work, name=name))
        return self.all[-1]


@pytest_asyncio.fixture
async def rig(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(module, "RETRY_S", 0.005)
    monkeypatch.setattr(module, "BREAKER", BreakerSettings(failures=3, open_s=0.01, most_open_s=1.0))
    tasks = Tasks()
    yield Rig(cast(asyncio.TaskGroup, tasks))
    for task in tasks.all:
        task.cancel()
    ends = await asyncio.gather(*tasks.all, return_exceptions=True)
    assert all(isinstance(end, asyncio.CancelledError) for end in ends)


def fail(error: TwostrokeError) -> Callable[[str], Any]:
    def answer(_: str) -> ProbeLinkResponse:
        raise error

    return answer


async def test_a_link_takes_traffic_after_its_probe(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    p, d = Worker("p"), Worker("d")
    d.gate.clear()
    rig.follow((p, d))
    assert not rig.links.usable(("p", "d"))
    assert rig.links.waiting_for([("p", "d")]) == "the link p -> d, which is being probed"
    assert not rig.links.snapshots()["p", "d"].healthy
    d.gate.set()
    await rig.until(lambda: rig.links.usable(("p", "d")))
    assert d.probes == ["p"]
    assert rig.links.snapshots()["p", "d"].bytes_per_s == 5e9
    assert caplog.messages == ["link p -> d uses rc_mlx5/mlx5_0:1: 5.00 GB/s, 0.010 ms"]
    rig.follow((p, d))
    assert rig.links.usable(("p", "d")), "what is there stays"
    assert not rig.links.usable(("d", "p")), "a link has a direction"


async def test_a_connector_without_addresses_needs_no_probe(rig: Rig) -> None:
    p, d = Worker("p", probed=False), Worker("d")
    rig.follow((p, d))
    assert rig.links.usable(("p", "d"))
    assert d.probes == []
    for _ in range(FAILURES):
        rig.links.failed(("p", "d"), LOST)
    assert not rig.links.usable(("p", "d"))
    await rig.until(lambda: rig.links.usable(("p", "d")))
    assert d.probes == [], "a pause is all that it can be given"


async def test_a_probe_that_fails_says_why_and_is_tried_again(rig: Rig) -> None:
    """O-38: not ready, with the reason."""
    p, d = Worker("p"), Worker("d")
    d.answer = fail(WorkerLostError("connection refused"))
    rig.follow((p, d))
    await rig.until(lambda: rig.states() == {"p -> d": LinkState.QUARANTINED})
    assert rig.links.waiting_for([("p", "d")]) == "the link p -> d, which failed: connection refused"
    d.answer = lambda _: FOUND
    await rig.until(lambda: rig.links.usable(("p", "d")))
    assert len(d.probes) >= 2


async def test_a_bad_pair_is_set_aside_alone(rig: Rig) -> None:
    p, q, d, e = (Worker(name) for name in "pqde")
    d.answer = lambda source: fail(KvCorruptError("wrong bytes"))(source) if source == "p" else FOUND
    rig.follow((p, d), (p, e), (q, d), (q, e))
    await rig.until(lambda: LinkState.PROBING not in rig.states().values())
    states = rig.states()
    assert states.pop("p -> d") is LinkState.QUARANTINED
    assert set(states.values()) == {LinkState.READY}


async def test_failures_in_a_row_set_a_link_aside_until_a_probe_succeeds(rig: Rig) -> None:
    """O-80: no error is for ever, and one is none."""
    p, d = Worker("p"), Worker("d")
    rig.follow((p, d))
    await rig.until(lambda: rig.links.usable(("p", "d")))
    for _ in range(5):
        for _ in range(FAILURES - 1):
            rig.links.failed(("p", "d"), LOST)
        rig.links.succeeded(("p", "d"))
    assert rig.links.usable(("p", "d"))
    for _ in range(FAILURES):
        rig.links.failed(("p", "d"), LOST)
    assert not rig.links.usable(("p", "d"))
    link = next(iter(rig.links))
    assert link.detail == "transfers in a row failed, the last one: the hold is over"
    assert link.failures == 5 * (FAILURES - 1) + FAILURES
    await rig.until(lambda: rig.links.usable(("p", "d")))
    assert d.probes == ["p", "p"]
    rig.links.failed(("p", "d"), LOST)
    assert not rig.links.usable(("p", "d")), "after a probe it is on trial"
    await rig.until(lambda: rig.links.usable(("p", "d")))
    rig.links.succeeded(("p", "d"))
    rig.links.failed(("p", "d"), LOST)
    assert rig.links.usable(("p", "d"))


async def test_a_new_life_is_a_new_link(rig: Rig) -> None:
    """O-79: nothing is known of a worker that has started again."""
    p, d = Worker("p"), Worker("d")
    rig.follow((p, d))
    await rig.until(lambda: rig.links.usable(("p", "d")))
    for _ in range(FAILURES - 1):
        rig.links.failed(("p", "d"), LOST)
    d.gate.clear()
    p.info.epoch = "p 2"
    rig.follow((p, d))
    assert rig.states() == {"p -> d": LinkState.PROBING}
    assert next(iter(rig.links)).failures == 0
    d.gate.set()
    await rig.until(lambda: rig.links.usable(("p", "d")))
    rig.links.failed(("p", "d"), LOST)
    assert rig.links.usable(("p", "d"))
    rig.follow()
    assert rig.states() == {}
    rig.links.failed(("p", "d"), LOST)
    rig.links.succeeded(("p", "d"))
    assert rig.links.waiting_for([("p", "d")]) == "a link"
