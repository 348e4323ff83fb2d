"""One request's way through the cluster: placed, attempted, and placed again when a worker fails.

Whatever fails, tokens that the client has are never sent again: the next attempt carries them, and the engine continues
from them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable

from twostroke.config import LossMode
from twostroke.errors import AnswerLostError, NoWorkerError, OverloadedError, TwostrokeError, WorkerLostError
from twostroke.policy.plan import Option, Plan
from twostroke.policy.snapshot import DEFAULT_SLO, Slo
from twostroke.router.attempt import RETRYABLE, Attempt
from twostroke.router.member import Member, MemberState
from twostroke.router.output import FailedAttempt, Output
from twostroke.router.pool import WorkerPool
from twostroke.router.progress import Progress
from twostroke.router.waiting import WaitingRoom
from twostroke.v1.engine_pb2 import EngineRequest

log = logging.getLogger(__name__)

# A request that has begun is worth waiting for a worker that restarts or a link that is probed again.
COMEBACK_S = 5.0


class Flight:
    """A request in the air. `emit` takes its outputs, in order."""

    def __init__(
        self,
        request: EngineRequest,
        pool: WorkerPool,
        room: WaitingRoom,
        emit: Callable[[Output], None],
        *,
        attempts: int,
        deadline_s: float,
        handoff_timeout_s: float,
        unseeded_loss: LossMode,
        tenant: str = "",
        slo: Slo = DEFAULT_SLO,
    ) -> None:
        self.request_id = request.request_id
        self._progress = Progress(request, emit, deadline_s, tenant, slo)
        self.trail = self._progress.trail
        self._pool = pool
        self._room = room
        self._attempts = attempts
        self._handoff_timeout_s = handoff_timeout_s
        self._unseeded_loss = unseeded_loss

    @property
    def recomputed(self) -> bool:
        """Whether decode computed more of a transferred prompt than the one block that a hand-off may leave."""
        computed_tokens = self.trail.decode_computed_tokens
        return bool(self.trail.transferred_tokens) and computed_tokens > self._progress.block_tokens

    def enter(self) -> Callable[[object], None]:
        """Joins those that wait for room, before `run`. Returns what to call when the flight is over, in any case.

        Raises what WaitingRoom.enter does.
        """
        progress = self._progress
        progress.cached_tokens = self._pool.prefixes.cached_tokens(progress.request)
        ticket = progress.ticket = self._room.enter(progress.placement())
        return lambda _: self._room.leave(ticket)

    async def run(self) -> None:
        """Flies to the end. Raises the TwostrokeError that ended it; cancellation frees everything on every worker."""
        fruitless = 0
        for number in itertools.count(1):
            self.trail.attempts = number
            delivered = len(self._progress.delivered)
            try:
                await self._attempt(number)
                self._room.pace_of(self.trail)
                return
            except OverloadedError as error:
                # Another router was faster. That says nothing about the request, and room comes with time.
                self._note_failure(error)
                await self._pool.wait_report()
            except RETRYABLE as error:
                self._note_failure(error)
                # A long answer may outlive many workers: only attempts that brought nothing count.
                fruitless = fruitless + 1 if len(self._progress.delivered) == delivered else 0
                if fruitless == self._attempts or self._progress.remaining_s() <= 0:
                    raise
                self._refuse_another_answer(error)
                log.warning("request %s: attempt %d failed, placing it again: %s", self.request_id, number, error)
            finally:
                self._pool.inflight.ended(self._progress.ticket)
                self.trail.finished_s = time.monotonic()

    def _refuse_another_answer(self, error: TwostrokeError) -> None:
        delivered = len(self._progress.delivered)
        if delivered and self._unseeded_loss == "fail" and not self._progress.repeatable:
            raise AnswerLostError(
                f"after {delivered} tokens of an answer that was drawn without a seed: {error.message}; ask again, "
                "with a seed for one that survives this, or start the router with --unseeded-loss continue"
            ) from error

    def _note_failure(self, error: TwostrokeError) -> None:
        trail = self.trail
        worker = trail.prefill_worker_id if trail.placed_s is not None else ""
        trail.failed_attempts.append(
            FailedAttempt(
                placed_s=trail.placed_s,
                failed_s=time.monotonic(),
                prefill_worker_id=worker,
                reason=error.message,
                error_type=error.reason,
                decode_worker_id=trail.admitted_on,
                option=trail.option,
                handoff_begun_s=trail.handoff_begun_s,
            )
        )

    async def _attempt(self, number: int) -> None:
        self.trail.option = self.trail.admitted_on = ""
        plan = await (self._room.turn(self._progress.ticket) if number == 1 else self._place_again())
        self.trail.placed_s, self.trail.option, self.trail.plan = time.monotonic(), plan.option.value, plan
        decode = self._member(plan.decode)
        attempt = Attempt(
            f"{self.request_id}.{number}",
            self._progress,
            self._pool,
            self._handoff_timeout_s,
            plan.chunk_tokens or 0,
        )
        if plan.prefill is None:
            await attempt.alone(decode)
        else:
            await attempt.two_strokes(self._member(plan.prefill), decode)

    async def _place_again(self) -> Plan:
        """A plan, as soon as there is room. Waits for COMEBACK_S for workers and links to come back when there is
        none."""
        until_s = time.monotonic() + COMEBACK_S
        self._progress.cached_tokens = self._pool.prefixes.cached_tokens(self._progress.request)
        while True:
            wanted = self._progress.placement()
            try:
                # It has begun: what its deadline leaves is worth trying.
                plan = self._pool.place(wanted, refuses=False)
                if plan.option is not Option.WAIT:
                    self._pool.inflight.placed(self._progress.ticket, wanted, plan, time.monotonic())
                    return plan
            except NoWorkerError:
                if time.monotonic() >= until_s:
                    raise
            await self._pool.wait_report()

    def _member(self, address: str) -> Member:
        member = self._pool.member(address)
        if member is None or member.state is not MemberState.READY:
            raise WorkerLostError(f"worker {address} went away between placement and use")
        return member
