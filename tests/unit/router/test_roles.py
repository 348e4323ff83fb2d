"""The controller of roles, carried out on workers that do as told."""

from __future__ import annotations

from typing import cast

import pytest

from twostroke.errors import UnavailableError
from twostroke.policy.demand import ObservedDemand
from twostroke.policy.inflight import InFlight
from twostroke.policy.plan import Plan
from twostroke.policy.ratio import Mode, RatioSettings
from twostroke.policy.snapshot import PlacementRequest, Slo, WorkerSnapshot
from twostroke.router.pool import WorkerPool
from twostroke.router.roles import RoleDriver
from twostroke.v1.worker_pb2 import ROLE_DECODE, ROLE_PREFILL, GetInfoResponse, Role, WatchLoadResponse

SLO = Slo(4.0, 0.2)


class Worker:
    """As much of a Member as the driver needs."""

    def __init__(self, name: str, role: Role.ValueType) -> None:
        self.address = self.worker_id = name
        self.role = role
        self.info = GetInfoResponse(worker_id=name)
        self.load = WatchLoadResponse()
        self.refusal: UnavailableError | None = None

    async def set_role(self, role: Role.ValueType) -> Role.ValueType:
        if self.refusal:
            raise self.refusal
        before, self.role = self.role, role
        return before


class Rig:
    """One prefill and three decode workers under a load of long prompts and short answers."""

    def __init__(self, mode: Mode) -> None:
        self.workers = [Worker("p", ROLE_PREFILL), *(Worker(f"d{i}", ROLE_DECODE) for i in range(3))]
        self.inflight = InFlight()
        for each in self.workers:
            reads = each.role == ROLE_PREFILL
            facts = WorkerSnapshot(each.address, reads, not reads, total_blocks=9999, block_size_tokens=16)
            self.inflight.describe(facts)
        self.resting: frozenset[str] = frozenset()
        self.demand, self.fed_s = ObservedDemand(), -200.0
        settings = RatioSettings(mode, hold_s=10, dwell_s=60, drain_s=60, both=False)
        self.driver = RoleDriver(cast(WorkerPool, self), self.demand, settings)

    def ready_members(self) -> list[Worker]:
        return self.workers

    def choose_from(self, resting: frozenset[str]) -> None:
        self.resting = resting

    async def look(self, now_s: float) -> str:
        """After three requests in two seconds, all the time."""
        while self.fed_s < now_s:
            self.fed_s += 2 / 3
            self.demand.arrived(self.fed_s, SLO)
            self.demand.served(self.fed_s, 4000, 0, 4)
        await self.driver.look(now_s)
        return self.driver.latest.do.value


async def test_a_worker_is_drained_before_its_role_changes() -> None:
    rig = Rig(Mode.ON)
    assert [await rig.look(second) for second in (0.0, 5.0, 9.0)] == ["nothing"] * 3
    assert await rig.look(11.0) == "drain"
    chosen = rig.driver.latest.worker
    assert rig.resting == {chosen}
    request = PlacementRequest(100)
    rig.inflight.placed("r", request, Plan("p", chosen), 11.0)
    assert await rig.look(16.0) == "nothing"
    assert rig.resting == {chosen}, "it writes an answer still"
    rig.inflight.ended("r")
    assert await rig.look(21.0) == "set role"
    assert next(each for each in rig.workers if each.address == chosen).role == ROLE_PREFILL
    assert (rig.resting, rig.driver.changes) == (frozenset(), 1)
    assert [await rig.look(second) for second in (26.0, 60.0)] == ["nothing"] * 2, "it rests"


async def test_advice_changes_nothing() -> None:
    rig = Rig(Mode.ADVISE)
    for second in (0.0, 11.0, 22.0):
        assert await rig.look(second) == "nothing"
    assert rig.driver.latest.worker.startswith("d")
    assert "should become prefill" in rig.driver.latest.why
    assert rig.resting == frozenset()
    assert [each.role for each in rig.workers] == [ROLE_PREFILL, ROLE_DECODE, ROLE_DECODE, ROLE_DECODE]


async def test_nothing_is_decided_before_something_was_answered() -> None:
    rig = Rig(Mode.ON)
    await rig.driver.look(0.0)
    assert rig.driver.latest.why == "nothing was answered yet"


async def test_a_worker_that_cannot_be_told_is_used_again() -> None:
    rig = Rig(Mode.ON)
    for each in rig.workers:
        each.refusal = UnavailableError("gone")
    for second in (0.0, 11.0, 16.0):
        await rig.look(second)
    assert rig.driver.latest.do.value == "set role"
    assert (rig.resting, rig.driver.changes) == (frozenset(), 0)


async def test_a_driver_that_is_off_ends_at_once() -> None:
    await Rig(Mode.OFF).driver.run()


@pytest.mark.parametrize("held", [0, 1])
async def test_kv_that_waits_to_be_fetched_keeps_a_worker_from_being_idle(held: int) -> None:
    rig = Rig(Mode.ON)
    rig.workers[1].load.held_handoffs = held
    (now,) = rig.inflight.snapshots(["d0"])
    candidate = rig.driver._candidate(rig.workers[1], now)  # type: ignore[arg-type]
    assert candidate.idle is not bool(held)
