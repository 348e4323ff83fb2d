"""Drives one engine and hands every output to the call that owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

from twostroke.engine.base import Engine, EngineInfo, EngineLoad, EngineOutput, LinkReport, Stroke
from twostroke.errors import (
    EngineError,
    InvalidRequestError,
    OverloadedError,
    StaleEpochError,
    TwostrokeError,
    UnavailableError,
)
from twostroke.policy.step_watch import StepWatch
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint
from twostroke.worker.kv_feed import KvFeed
from twostroke.worker.observer import Observer
from twostroke.worker.step_samples import StepSamples

log = logging.getLogger(__name__)

MIN_REPORT_INTERVAL_S = 0.1
LOOK_S = 0.25
"""How often an awaited step is looked for."""


class Owner(Protocol):
    """Whoever admitted a request. Called from the event loop; must not block."""

    def deliver(self, output: EngineOutput) -> None:
        """One output of one of its requests."""

    def flush(self) -> None:
        """The step that outputs were delivered of is complete."""

    def lost(self, error: TwostrokeError) -> None:
        """The engine is gone, and all requests with it."""


class EngineHost:
    """Owns the engine's step loop. Request ids are unique across all owners."""

    def __init__(
        self, engine: Engine, info: EngineInfo, worker_id: str, epoch: str, *, stall_s: float = math.inf
    ) -> None:
        self.info = info
        self.worker_id = worker_id
        self.epoch = epoch
        self.load = EngineLoad()
        self.observers: list[Observer] = []
        self.kv = KvFeed(epoch)
        self.samples = StepSamples()
        self._engine = engine
        self._owners: dict[str, Owner] = {}
        self._changed = asyncio.Condition()
        self._sessions: Counter[str] = Counter()
        self._held: dict[str, set[str]] = {}
        """Ids of finished prompts whose KV is held, by router; routers tell when it need not be any more."""
        self.draining = asyncio.Event()
        """Set for good when it takes no new requests any more."""
        self._said = 0
        """Counts what is news beside the load."""
        self._failed: TwostrokeError | None = None
        self._steps = StepWatch(stall_s)
        self._promised: dict[str, tuple[int, int]] = {}
        """KV blocks that the load does not count yet, of requests just admitted, and the look at which it does."""
        self._looks = 0
        self._computing: set[str] = set()
        """Requests that the engine could compute at once, as far as is known here."""
        self.stalled = ""
        """Why the engine counts as stalled; empty when it does not."""

    @property
    def active_requests(self) -> int:
        """Requests admitted and not over."""
        return len(self._owners)

    def check_epoch(self, epoch: str) -> None:
        """Raises StaleEpochError when the caller means an earlier life of this worker."""
        if epoch != self.epoch:
            raise StaleEpochError(
                f"worker {self.worker_id} has epoch {self.epoch}, the caller knows {epoch or 'none'}: it restarted"
            )

    async def run(self) -> None:
        """The step loop; returns only by cancellation or EngineError, after all owners were told."""
        try:
            while True:
                step = await self._engine.next_step()
                self._route(step.outputs)
                for observer in self.observers:
                    observer.stepped(step.outputs, step.load)
                self.kv.took(step.kv_changes)
                self.samples.took(step.samples)
                self._stepped(step.load)
                self._looks += 1
                if self._promised:
                    self._promised = {name: kept for name, kept in self._promised.items() if kept[1] > self._looks}
                await self._announce(step.load)
        except Exception as error:
            lost = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            self._failed = lost
            for owner in set(self._owners.values()):
                owner.lost(lost)
            for observer in self.observers:
                observer.lost(lost)
            self._owners.clear()
            raise lost from error

    def _route(self, outputs: Sequence[EngineOutput]) -> None:
        touched: dict[int, Owner] = {}
        for output in outputs:
            owner = self._owners.get(output.request_id)
            if owner is None:
                continue
            owner.deliver(output)
            touched[id(owner)] = owner
            if output.done:
                self._forget(output.request_id)
        for owner in touched.values():
            owner.flush()

    def _stepped(self, load: EngineLoad) -> None:
        if load.steps != self.load.steps:
            # Prompts that wait for memory that is held for others are not the engine's fault.
            self._steps.stepped(time.monotonic(), busy=load.running_requests > 0 or self._could_compute(load))
            if self.stalled:
                log.warning("the engine steps again")
                self.stalled = ""

    def _could_compute(self, load: EngineLoad) -> bool:
        return bool(self._computing) and not load.held_blocks

    async def watch_steps(self, set_ready: Callable[[bool], Awaitable[None]]) -> None:
        """Tells routers when the engine stalls, and when it goes on; returns only by cancellation.

        set_ready: for others that ask, whether the worker takes requests; called when that changes.
        """
        said = True
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.load.running_requests and not self._could_compute(self.load):
                self._steps.idle()
            elif not self.stalled and self._steps.overdue_s(time.monotonic()):
                self.stalled = f"the engine of {self.worker_id} has made no step for {self._steps.limit_s:.1f} s"
                log.error("%s, though it has requests to compute", self.stalled)
                await self.tell()
            ready = not (self.stalled or self.draining.is_set())
            if ready != said:
                said = ready
                await set_ready(ready)

    def check_steps(self) -> None:
        """Raises UnavailableError while the engine is stalled."""
        if self.stalled:
            raise UnavailableError(self.stalled)

    async def _announce(self, load: EngineLoad) -> None:
        self.load = load
        async with self._changed:
            self._changed.notify_all()

    async def admit(
        self,
        request: EngineRequest,
        stroke: Stroke,
        owner: Owner,
        handoff: Handoff | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        """Gives the engine a request whose outputs go to `owner`. chunk_tokens: see Engine.admit.

        Raises UnavailableError while draining, OverloadedError when there are no blocks for a prompt whose answer is to
        be written here (its router waits then, and needs not know of the others), InvalidRequestError for an id in use,
        and what the engine raises; nothing is held then.
        """
        if self._failed is not None:
            raise self._failed
        self.check_steps()
        if self.draining.is_set():
            raise UnavailableError(f"worker {self.worker_id} is draining; place the request elsewhere")
        if request.request_id in self._owners:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use on worker {self.worker_id}")
        if stroke is not Stroke.PREFILL:
            self._promise_room(request)
        self._owners[request.request_id] = owner
        if stroke is not Stroke.DECODE:
            self._computing.add(request.request_id)
            self._steps.given(time.monotonic())
        for observer in self.observers:
            observer.admitted(request, stroke)
        try:
            await self._engine.admit(request, stroke, handoff, chunk_tokens)
        except BaseException:
            self._forget(request.request_id)
            self._stop_observing([request.request_id])
            raise

    def _promise_room(self, request: EngineRequest) -> None:
        total = self.info.total_blocks
        tokens = len(request.prompt_token_ids) + len(request.output_token_ids)
        needed = tokens // self.info.layout.block_size_tokens + 1
        promised = sum(blocks for blocks, _ in self._promised.values())
        # An engine on which nothing runs may not have reported what it freed last.
        if self._owners and needed <= total < self.load.used_blocks + promised + needed:
            raise OverloadedError(
                f"worker {self.worker_id} has no room for {needed} KV blocks: of {total}, {self.load.used_blocks} are "
                f"in use and {promised} promised"
            )
        # The step that runs now does not know of the request; the next one gives it its blocks.
        self._promised[request.request_id] = needed, self._looks + 2

    def _forget(self, request_id: str) -> None:
        self._owners.pop(request_id, None)
        self._promised.pop(request_id, None)
        self._computing.discard(request_id)

    def _stop_observing(self, request_ids: Sequence[str]) -> None:
        for observer in self.observers:
            observer.cancelled(request_ids)

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests; their owners hear nothing more. Unknown ids are ignored."""
        for request_id in request_ids:
            self._forget(request_id)
        self._stop_observing(request_ids)
        if request_ids and self._failed is None:
            await self._engine.cancel(request_ids)
            await self._announce(self.load)

    def enter(self, router_id: str) -> None:
        """A session of a router begins."""
        self._sessions[router_id] += 1

    async def leave(self, router_id: str) -> None:
        """A session of a router ends; with its last one, what is held for it is freed."""
        self._sessions[router_id] -= 1
        if not self._sessions[router_id]:
            del self._sessions[router_id]
            if held := self._held.pop(router_id, None):
                await self._engine.release(list(held))

    def hold(self, router_id: str, request_id: str) -> None:
        """KV of a finished prompt is held for a router."""
        if router_id in self._sessions:
            self._held.setdefault(router_id, set()).add(request_id)

    async def release(self, request_ids: Sequence[str]) -> int:
        """Frees held KV; returns how many of the ids held any."""
        for held in self._held.values():
            held.difference_update(request_ids)
        return await self._engine.release(request_ids)

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """Reads from another worker's memory; see Engine.probe."""
        return await self._engine.probe(worker_id, epoch, endpoint)

    async def drop_peer(self, worker_id: str, epoch: str) -> None:
        """Forgets an epoch of another worker. Raises InvalidRequestError for this worker's own."""
        if epoch == self.epoch:
            raise InvalidRequestError(f"epoch {epoch} of worker {self.worker_id} is not over: it answers")
        log.info("epoch %s of worker %s is over; its KV is given up", epoch, worker_id)
        await self._engine.drop_peer(worker_id, epoch)

    async def tell(self) -> None:
        """Has `loads` report now: something beside the load changed."""
        self._said += 1
        await self._announce(self.load)

    async def begin_drain(self) -> int:
        """Takes no new requests from now on. Returns how many run."""
        self.draining.set()
        await self.tell()
        return len(self._owners)

    async def drain(self, timeout_s: float) -> None:
        """Takes no new requests and waits until the running ones are over and their KV was fetched, at most
        timeout_s."""
        await self.begin_drain()
        try:
            async with asyncio.timeout(timeout_s):
                async with self._changed:
                    await self._changed.wait_for(lambda: not self._owners and not self.load.held_handoffs)
        except TimeoutError:
            log.warning(
                "drain: %d requests still run after %.0f s, and %d hand-offs are held; routers move them now",
                len(self._owners),
                timeout_s,
                self.load.held_handoffs,
            )

    async def loads(self, interval_s: float) -> AsyncIterator[EngineLoad]:
        """The load now, and then whenever more than a step count changed, or `tell` was called; at most every
        MIN_REPORT_INTERVAL_S and at least every interval_s. Never ends by itself."""
        while True:
            told, said = self.load, self._said
            yield told
            # An engine that waits for KV steps a thousand times a second; none of that is news.
            await asyncio.sleep(MIN_REPORT_INTERVAL_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(interval_s), self._changed:
                    while replace(self.load, steps=told.steps) == told and said == self._said:
                        await self._changed.wait()
