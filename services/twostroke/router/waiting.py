"""The queue in front of placement: a request waits here while no worker has room for it, or all of a kind are away."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

from twostroke.config import RouterSettings
from twostroke.errors import DeadlineError, NoWorkerError, OverloadedError, TwostrokeError
from twostroke.policy.admission import AdmissionQueue, Entry, QueueSettings, Servers
from twostroke.policy.pace import Pace
from twostroke.policy.plan import Option, Plan
from twostroke.policy.snapshot import PlacementRequest
from twostroke.router.output import Trail
from twostroke.router.pool import WorkerPool

# An engine on which nothing runs may not have reported what it freed last: a request that waits though this router has
# nothing at work finds out.
STALE_S = 2.0


class WaitingRoom:
    """Of one router. All methods from one event loop."""

    def __init__(self, settings: RouterSettings, pool: WorkerPool) -> None:
        self.pace = Pace()
        self._pool = pool
        self._patience_s = settings.patience_s
        bounds = QueueSettings(most_queued=settings.queue_requests, most_in_flight=settings.tenant_requests)
        self._queue = AdmissionQueue(bounds)
        self._turns: dict[str, asyncio.Future[Plan]] = {}
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def enter(self, request: PlacementRequest) -> str:
        """Takes a request in; returns the ticket for `turn` and `leave`.

        Raises OverloadedError when its priority's queue is full, or when it would miss its deadline here and not after
        retry_after_s; DeadlineError when it would miss it anyway. So does `turn`, for one that has waited.
        """
        ticket = str(next(self._numbers))
        prefill_s = self.pace.prefill_s(request.prompt_tokens)
        answer_s = self.pace.answer_s(request.expected_output_tokens)
        self._queue.offer(Entry(ticket, request, time.monotonic(), prefill_s, answer_s), self._servers())
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        # Whoever waits may be gone when it fails.
        turn.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._serve()
        if turn.done() and (refused := turn.exception()):
            self.leave(ticket)
            raise refused
        if len(self._queue) and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._serve_all(), name="waiting requests")
        return ticket

    async def turn(self, ticket: str) -> Plan:
        """Where the request goes, as soon as there is room; it counts as in flight there from then on.

        Raises NoWorkerError when workers are away for too long.
        """
        return await self._turns[ticket]

    def leave(self, ticket: str) -> None:
        """The request is over, wherever it is."""
        if turn := self._turns.pop(ticket, None):
            turn.cancel()
        self._queue.cancel(ticket)
        self._queue.ended(ticket)
        self._pool.inflight.ended(ticket)
        if len(self._queue):
            self._serve()

    def pace_of(self, trail: Trail) -> None:
        """Learns from a request that was answered at the first attempt."""
        if trail.attempts == 1 and trail.first_token_s is not None and trail.finished_s is not None:
            self.pace.read(trail.prompt_tokens - trail.cached_tokens, trail.prefill_run_ms / 1000)
            self.pace.wrote(trail.completion_tokens - 1, trail.finished_s - trail.first_token_s)

    async def close(self) -> None:
        """Ends what runs here."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _servers(self) -> Servers:
        readers = [worker for worker in self._pool.snapshot().workers if self._pool.may_read(worker)]
        pending = min((worker.pending_prompt_tokens for worker in readers), default=0)
        return Servers(len(readers), self.pace.prefill_s(pending))

    async def _serve_all(self) -> None:
        while len(self._queue):
            # The order among those that wait changes with time, too.
            await self._pool.wait_report()
            self._serve()
        self._task = None

    def _serve(self) -> None:
        """Starts what can start now; gives up what waits for workers that stay away."""
        now_s = time.monotonic()
        away: list[NoWorkerError] = []

        def try_start(entry: Entry) -> bool:
            if self._turns[entry.request_id].done():
                return False
            waited_s = now_s - entry.arrived_s
            deadline_s = entry.request.deadline_s
            request = entry.request if deadline_s is None else replace(entry.request, deadline_s=deadline_s - waited_s)
            try:
                plan = self._pool.place(request)
            except NoWorkerError as error:
                away.append(error)
                return False
            if plan.option is Option.WAIT and waited_s >= STALE_S and len(self._turns) == len(self._queue):
                plan = self._pool.place(request, waits=False)
            if plan.option is Option.REFUSE:
                self._queue.cancel(entry.request_id)
                self._turns[entry.request_id].set_exception(refusal(plan))
                return False
            if plan.option is Option.WAIT:
                return False
            self._pool.inflight.placed(entry.request_id, request, plan, now_s)
            self._turns[entry.request_id].set_result(plan)
            return True

        self._queue.start(now_s, try_start)
        if away and self._pool.away_s() >= self._patience_s:
            for ticket, turn in self._turns.items():
                if not turn.done():
                    self._queue.cancel(ticket)
                    turn.set_exception(NoWorkerError(away[0].message, retry_after_s=self._patience_s))


def refusal(plan: Plan) -> TwostrokeError:
    """What a client is told that no way would serve in time."""
    soonest = min(plan.why, key=lambda estimate: estimate.finish_s)
    message = (
        f"no way meets the deadline: the soonest, {soonest.option.value}, is predicted to end after "
        f"{soonest.finish_s:.1f} s, {soonest.queue_s:.1f} s of them in a queue"
    )
    if plan.retry_after_s is None:
        return DeadlineError(message)
    return OverloadedError(message, retry_after_s=max(1.0, plan.retry_after_s))
