"""The controller of roles at work: it looks every few seconds, says what should change, and changes it where it may."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from twostroke.errors import TwostrokeError
from twostroke.policy.attainment import Member as Candidate
from twostroke.policy.attainment import Role
from twostroke.policy.demand import ObservedDemand
from twostroke.policy.ratio import Decision, Do, Mode, RatioSettings, RoleController
from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.router.member import Member
from twostroke.router.pool import WorkerPool
from twostroke.v1.worker_pb2 import ROLE_BOTH, ROLE_DECODE, ROLE_PREFILL

log = logging.getLogger(__name__)

LOOK_S = 5.0
WIRE = {Role.PREFILL: ROLE_PREFILL, Role.DECODE: ROLE_DECODE, Role.BOTH: ROLE_BOTH}
_ROLES = {wire: role for role, wire in WIRE.items()}
_QUIET = Decision(Do.NOTHING, why="nothing was answered yet")


class RoleDriver:
    """Of one router; `on` is for one router of a cluster, since controllers do not know of each other."""

    def __init__(
        self, pool: WorkerPool, demand: ObservedDemand, settings: RatioSettings, look_s: float = LOOK_S
    ) -> None:
        self.mode = settings.mode
        self.latest = _QUIET
        """What it found when it last looked."""
        self.changes = 0
        """Roles that it has changed."""
        self._pool = pool
        self._demand = demand
        self._controller = RoleController(settings)
        self._look_s = look_s

    async def run(self) -> None:
        """Looks until it is cancelled; at once back when it is off."""
        while self.mode is not Mode.OFF:
            await asyncio.sleep(self._look_s)
            await self.look(time.monotonic())

    async def look(self, now_s: float) -> None:
        """Decides once and carries it out. now_s: of the monotonic clock."""
        demand = self._demand.mean(now_s)
        if demand is None:
            self.latest = _QUIET
            return
        members = self._pool.ready_members()
        candidates = [self._candidate(each, now) for each in members for now in self._seen(each)]
        decision = self._controller.decide(candidates, demand, now_s)
        if decision.do is not Do.NOTHING or (decision.worker and decision.worker != self.latest.worker):
            log.info("roles: %s", decision.why)
        self.latest = decision
        chosen = next((each for each in members if each.worker_id == decision.worker), None)
        if decision.do is Do.DRAIN and chosen is not None:
            self._pool.choose_from(frozenset({chosen.address}))
        elif decision.do is Do.KEEP_ROLE:
            self._pool.choose_from(frozenset())
        elif decision.do is Do.SET_ROLE and chosen is not None and decision.role is not None:
            await self._set_role(chosen, decision.role)

    async def _set_role(self, member: Member, role: Role) -> None:
        try:
            await member.set_role(WIRE[role])
            self.changes += 1
        except TwostrokeError as error:
            log.warning("worker %s kept its role: %s", member.worker_id, error)
        finally:
            self._pool.choose_from(frozenset())

    def _seen(self, member: Member) -> Sequence[WorkerSnapshot]:
        return self._pool.inflight.snapshots([member.address])

    def _candidate(self, member: Member, now: WorkerSnapshot) -> Candidate:
        held = member.load.held_handoffs if member.load else 0
        return Candidate(
            member.worker_id,
            _ROLES[member.role],
            now.step_model,
            load=now.pending_prompt_tokens + now.context_tokens,
            idle=not (now.pending_prompts or now.running_sequences or held),
            kv_tokens=now.total_blocks * now.block_size_tokens,
            step_budget_tokens=now.step_budget_tokens,
        )
