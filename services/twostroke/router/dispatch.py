"""All requests of a router: starts them, ends them, and passes their outputs on in batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from itertools import islice

from twostroke.config import RouterSettings
from twostroke.errors import DeadlineError, EngineError, InvalidRequestError, NoWorkerError, TwostrokeError
from twostroke.policy.demand import ObservedDemand
from twostroke.policy.ratio import Mode, RatioSettings
from twostroke.router.edge import Edge
from twostroke.router.flight import Flight
from twostroke.router.observer import RequestObserver
from twostroke.router.output import Output, Sink, Trail
from twostroke.router.pool import WorkerPool
from twostroke.router.roles import RoleDriver
from twostroke.router.waiting import WaitingRoom
from twostroke.telemetry.logs import RequestIds, request_ids
from twostroke.v1.engine_pb2 import EngineRequest

log = logging.getLogger(__name__)

REMEMBERED_TRAILS = 1000


class Dispatcher:
    """Owns every flight. One per router; all methods from one event loop."""

    def __init__(self, settings: RouterSettings, router_id: str) -> None:
        self.pool = WorkerPool(settings, router_id, step_done=self._flush)
        self.room = WaitingRoom(settings, self.pool)
        self.demand = ObservedDemand()
        """What arrived of late."""
        ratio = RatioSettings(Mode(settings.roles), both=self.pool.options.d_alone)
        self.roles = RoleDriver(self.pool, self.demand, ratio)
        self.router_id = router_id
        self.recomputed_prompts = 0
        """Requests whose decode worker computed a transferred prompt again."""
        self.loading = ""
        """What the front end still does before it can serve; empty when it can."""
        self.observer = RequestObserver(None, None, log_prompts=settings.log_prompts)
        """Who hears of every request that is over."""
        self.request_timeout_s = settings.request_timeout_s
        """Deadline of requests that bring none."""
        self._settings = settings
        self._sink: Sink | None = None
        self._batch: list[Output] = []
        self._flights: dict[str, asyncio.Task[None]] = {}
        self._trails: OrderedDict[str, Trail] = OrderedDict()

    @property
    def active_requests(self) -> int:
        """Requests in flight."""
        return len(self._flights)

    def waiting_for(self) -> str:
        """What keeps the router from serving; empty when nothing does."""
        return self.loading or self.pool.waiting_for()

    def closed_for(self) -> str:
        """What keeps the router from taking requests; empty when it takes them, though workers may be away for a
        moment: requests wait for those."""
        return self.loading or (self.waiting_for() if self.pool.away_s() >= self._settings.patience_s else "")

    def connect(self, sink: Sink) -> None:
        """Sets who takes the outputs."""
        self._sink = sink

    def submit(self, request: EngineRequest, *, timeout_s: float | None = None, public_id: str = "") -> None:
        """Starts a request; its outputs go to the sink, the last one with `finish` or `failure`.

        public_id: the id under which `trail` finds it; the request's own when empty. Raises InvalidRequestError for an
        id in use or a class that there is not, NoWorkerError when nothing has been able to serve it for a while, and
        what WaitingRoom.enter raises.
        """
        edge = Edge.current.get()
        try:
            self._start(request, edge, timeout_s, public_id)
        except TwostrokeError as error:
            self.observer.refused(error, edge)
            raise

    def _start(self, request: EngineRequest, edge: Edge | None, timeout_s: float | None, public_id: str) -> None:
        if request.request_id in self._flights:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use; choose another")
        if waiting_for := self.closed_for():
            raise NoWorkerError(f"the router is not ready: it waits for {waiting_for}")
        if request.ByteSize() > self._settings.rpc.max_message_bytes // 2:
            # It would break the session that it shares with others.
            raise InvalidRequestError(
                f"the request takes {request.ByteSize()} bytes; workers get no more than half of "
                f"--rpc-max-message-bytes, {self._settings.rpc.max_message_bytes}"
            )
        deadline_s = time.monotonic() + min(timeout_s or float("inf"), self.request_timeout_s)
        slo = self.pool.slo_classes.of(edge.slo if edge else "")
        self.demand.arrived(time.monotonic(), slo)
        flight = Flight(
            request,
            self.pool,
            self.room,
            self._emit,
            tenant=edge.tenant if edge else "",
            slo=slo,
            attempts=self._settings.prefill_attempts,
            handoff_timeout_s=self._settings.handoff_timeout_s,
            unseeded_loss=self._settings.unseeded_loss,
            deadline_s=deadline_s,
        )
        leave = flight.enter()
        if edge is not None:
            edge.trails.append(flight.trail)
            edge.request_id = public_id or request.request_id
            request.trace_context.clear()
            request.trace_context.update(edge.headers)
        self._remember(public_id or request.request_id, flight.trail)
        flying = self._fly(flight, request, edge, deadline_s)
        task = asyncio.get_running_loop().create_task(flying, name=request.request_id)
        # Not within the task: one that is cancelled before it began runs nothing.
        task.add_done_callback(leave)
        self._flights[request.request_id] = task

    def cancel(self, request_id: str) -> None:
        """Ends a request on every worker; nothing more is reported of it. Unknown ids are ignored."""
        if task := self._flights.pop(request_id, None):
            task.cancel()

    def trail(self, public_id: str) -> Trail | None:
        """Where the time of a recent request went."""
        return self._trails.get(public_id)

    def recent(self, limit: int) -> list[tuple[str, Trail]]:
        """Requests of late with their public ids, the newest first."""
        return list(islice(reversed(self._trails.items()), limit))

    def _remember(self, public_id: str, trail: Trail) -> None:
        self._trails[public_id] = trail
        while len(self._trails) > REMEMBERED_TRAILS:
            self._trails.popitem(last=False)

    async def _fly(self, flight: Flight, request: EngineRequest, edge: Edge | None, deadline_s: float) -> None:
        flight.trail.trace_id = edge.trace_id if edge else ""
        request_ids.set(RequestIds(request.request_id, flight.trail.trace_id))
        try:
            async with asyncio.timeout(deadline_s - time.monotonic()):
                await flight.run()
        except TwostrokeError as error:
            self._fail(flight, error)
        except TimeoutError:
            self._fail(flight, DeadlineError("the request's deadline passed before the answer was complete"))
        except Exception as error:
            log.exception("request %s failed", flight.request_id)
            self._fail(flight, EngineError(f"the router failed: {type(error).__name__}: {error}"))
        finally:
            flight.trail.over = True
            self._count(flight.trail)
            if self._flights.get(flight.request_id) is asyncio.current_task():
                del self._flights[flight.request_id]
            if flight.recomputed:
                self.recomputed_prompts += 1
                log.error(
                    "request %s: decode worker %s computed %d prompt tokens again",
                    flight.request_id,
                    flight.trail.decode_worker_id,
                    flight.trail.decode_computed_tokens,
                )
            self.observer.over(
                flight.request_id, request.prompt_token_ids, flight.trail, edge, recomputed=flight.recomputed
            )

    def _count(self, trail: Trail) -> None:
        if trail.answered:
            computed_tokens = trail.prompt_tokens - trail.cached_tokens
            self.demand.served(time.monotonic(), computed_tokens, trail.cached_tokens, trail.completion_tokens)

    def _fail(self, flight: Flight, error: TwostrokeError) -> None:
        log.warning("request %s failed: %s", flight.request_id, error)
        flight.trail.failure, flight.trail.error_type = error.message, error.reason
        self._emit(Output(flight.request_id, failure=error))

    def _emit(self, output: Output) -> None:
        if output.request_id not in self._flights:
            return
        if not self._batch:
            # Outputs that no decode step will flush: first tokens and failures.
            asyncio.get_running_loop().call_soon(self._flush)
        self._batch.append(output)

    def _flush(self) -> None:
        if self._batch and self._sink is not None:
            batch, self._batch = self._batch, []
            self._sink(batch)

    async def idle(self) -> None:
        """Returns when no request is in flight."""
        while self._flights:
            await asyncio.wait(list(self._flights.values()))

    async def close(self) -> None:
        """Ends every flight and waits until their workers were told."""
        tasks = list(self._flights.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.room.close()
