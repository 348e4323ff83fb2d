"""The queue at work, in front of a cluster that has room when it is told to."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import cast

import pytest

from twostroke.config import RouterSettings
from twostroke.errors import DeadlineError, NoWorkerError, OverloadedError, TwostrokeError
from twostroke.policy.inflight import InFlight
from twostroke.policy.placement import place
from twostroke.policy.plan import STRICT, Option, Plan
from twostroke.policy.snapshot import DEFAULT_LINK, ClusterSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.router import waiting
from twostroke.router.pool import WorkerPool
from twostroke.router.waiting import WaitingRoom

PLACED, FULL = Plan("p", "d"), Plan(None, "", Option.WAIT)


class Pool:
    """As much of a pool as a waiting room needs."""

    def __init__(self) -> None:
        self.rooms = 0
        self.away = 0.0
        self.refused: Plan | None = None
        self.inflight = InFlight()
        for name in ("p", "d"):
            self.inflight.describe(WorkerSnapshot(name, name == "p", name == "d", free_blocks=99, total_blocks=99))
        self.reported = asyncio.Event()

    def snapshot(self) -> ClusterSnapshot:
        return ClusterSnapshot(self.inflight.snapshots(["p", "d"]))

    def place(self, request: PlacementRequest, *, waits: bool = True) -> Plan:
        if self.away:
            raise NoWorkerError("no decode worker is ready")
        if self.refused:
            return self.refused
        if not waits:
            return PLACED
        self.rooms -= 1
        return PLACED if self.rooms >= 0 else FULL

    def may_read(self, worker: WorkerSnapshot) -> bool:
        return worker.reads_prompts

    def away_s(self) -> float:
        return self.away

    async def wait_report(self) -> None:
        await self.reported.wait()
        self.reported.clear()

    def report(self, rooms: int = 0) -> None:
        self.rooms = rooms
        self.reported.set()


class Rig:
    def __init__(self, pool: Pool, **settings: object) -> None:
        self.pool = pool
        self.room = WaitingRoom(RouterSettings(**settings), cast(WorkerPool, pool))  # type: ignore[arg-type]

    def enter(self, tenant: str = "", priority: int = 0) -> tuple[str, asyncio.Task[Plan]]:
        ticket = self.room.enter(PlacementRequest(10, tenant=tenant, priority=priority))
        return ticket, asyncio.create_task(self.room.turn(ticket))


@pytest.fixture
async def pool() -> Pool:
    return Pool()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_where_there_is_room_nobody_waits(pool: Pool) -> None:
    pool.rooms, rig = 1, Rig(pool)
    ticket = rig.room.enter(PlacementRequest(10))
    assert len(rig.room) == 0
    assert pool.snapshot().workers[0].pending_prompts == 1, "it counts from the decision on"
    assert await rig.room.turn(ticket) is PLACED
    rig.room.leave(ticket)
    assert pool.snapshot().workers[0].pending_prompts == 0


async def test_room_that_comes_goes_to_the_more_urgent_one(pool: Pool) -> None:
    rig = Rig(pool)
    (_, late), (_, urgent) = rig.enter(priority=1), rig.enter(priority=-1)
    await settled()
    assert len(rig.room) == 2
    pool.report(rooms=1)
    await settled()
    assert urgent.done()
    assert not late.done()
    pool.report(rooms=1)
    assert await late is PLACED


async def test_the_end_of_a_request_is_room_too(pool: Pool) -> None:
    pool.rooms, rig = 1, Rig(pool)
    (first, _), (_, second) = rig.enter(), rig.enter()
    pool.rooms = 1
    rig.room.leave(first)
    assert await second is PLACED


async def test_whoever_leaves_while_waiting_takes_no_room(pool: Pool) -> None:
    rig = Rig(pool, queue_requests=1)
    ticket, task = rig.enter()
    with pytest.raises(OverloadedError, match="1 requests of priority 0"):
        rig.room.enter(PlacementRequest(10))
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    rig.room.leave(ticket)
    assert len(rig.room) == 0
    pool.rooms = 1
    _, next_one = rig.enter()
    assert await next_one is PLACED


async def test_a_tenant_at_its_cap_waits_until_one_of_its_requests_is_over(pool: Pool) -> None:
    pool.rooms, rig = 9, Rig(pool, tenant_requests=1)
    (first, _), (_, second), (_, other) = rig.enter("a"), rig.enter("a"), rig.enter("b")
    await settled()
    assert other.done()
    assert not second.done()
    rig.room.leave(first)
    assert await second is PLACED


async def test_a_report_that_is_stale_does_not_keep_an_idle_router_waiting(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is at work, so nothing would bring another report."""
    rig = Rig(pool)
    _, first = rig.enter()
    _, second = rig.enter()
    pool.report()
    await settled()
    assert not first.done()
    monkeypatch.setattr(waiting, "STALE_S", 0.0)
    pool.report()
    assert await first is PLACED
    assert not second.done(), "one at a time"


async def test_workers_that_are_away_are_waited_for_until_patience_ends(pool: Pool) -> None:
    pool.away, rig = 1.0, Rig(pool, patience_s=2)
    _, task = rig.enter()
    pool.report()
    await settled()
    assert not task.done()
    pool.away = 2.0
    pool.report()
    with pytest.raises(NoWorkerError, match="decode") as caught:
        await task
    assert caught.value.retry_after_s == 2
    assert len(rig.room) == 0


def refusal(pending_prompt_tokens: int) -> Plan:
    """What placement says of a request with a second to go."""
    workers = [
        WorkerSnapshot("p", True, False, pending_prompt_tokens, free_blocks=999, total_blocks=999),
        WorkerSnapshot("d", False, True, free_blocks=999, total_blocks=999),
    ]
    links = {("p", "d"): DEFAULT_LINK}
    request = PlacementRequest(10, expected_output_tokens=10 if pending_prompt_tokens else 1000, deadline_s=1.0)
    return place(request, ClusterSnapshot(workers, links=links), replace(STRICT, refuse=True))


@pytest.mark.parametrize(("pending", "kind"), [(100_000, OverloadedError), (0, DeadlineError)])
async def test_what_no_way_serves_in_time_is_refused_before_it_waits(
    pool: Pool, pending: int, kind: type[TwostrokeError]
) -> None:
    pool.refused, rig = refusal(pending), Rig(pool)
    with pytest.raises(kind, match="no way meets the deadline: the soonest, p_then_d,") as caught:
        rig.room.enter(PlacementRequest(10))
    assert len(rig.room) == 0
    assert bool(caught.value.retry_after_s) is bool(pending)
    pool.refused, pool.rooms = None, 1
    ticket = rig.room.enter(PlacementRequest(10))
    assert await rig.room.turn(ticket) is PLACED


async def test_what_becomes_hopeless_while_it_waits_is_refused_then(pool: Pool) -> None:
    rig = Rig(pool)
    (_, task), (_, other) = rig.enter(), rig.enter()
    await settled()
    assert not task.done()
    pool.refused = refusal(100_000)
    pool.report()
    with pytest.raises(OverloadedError, match="no way"):
        await task
    with pytest.raises(OverloadedError, match="no way"):
        await other
    assert len(rig.room) == 0
