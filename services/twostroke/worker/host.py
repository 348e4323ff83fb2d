"""Drives one engine and hands every output to the call that owns it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Protocol

from twostroke.engine.base import Engine, EngineInfo, EngineLoad, EngineOutput, LinkReport, Stroke
from twostroke.errors import EngineError, InvalidRequestError, StaleEpochError, TwostrokeError, UnavailableError
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint

log = logging.getLogger(__name__)

MIN_REPORT_INTERVAL_S = 0.1


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

    def __init__(self, engine: Engine, info: EngineInfo, worker_id: str, epoch: str) -> None:
        self.info = info
        self.worker_id = worker_id
        self.epoch = epoch
        self.load = EngineLoad()
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
                await self._announce(step.load)
        except Exception as error:
            lost = error if isinstance(error, EngineError) else EngineError(f"{type(error).__name__}: {error}")
            self._failed = lost
            for owner in set(self._owners.values()):
                owner.lost(lost)
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
                del self._owners[output.request_id]
        for owner in touched.values():
            owner.flush()

    async def _announce(self, load: EngineLoad) -> None:
        self.load = load
        async with self._changed:
            self._changed.notify_all()

    async def admit(self, request: EngineRequest, stroke: Stroke, owner: Owner, handoff: Handoff | None = None) -> None:
        """Gives the engine a request whose outputs go to `owner`.

        Raises UnavailableError while draining, InvalidRequestError for an id in use, and what the engine raises;
        nothing is held then.
        """
        if self._failed is not None:
            raise self._failed
        if self.draining.is_set():
            raise UnavailableError(f"worker {self.worker_id} is draining; place the request elsewhere")
        if request.request_id in self._owners:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use on worker {self.worker_id}")
        self._owners[request.request_id] = owner
        try:
            await self._engine.admit(request, stroke, handoff)
        except BaseException:
            self._owners.pop(request.request_id, None)
            raise

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests; their owners hear nothing more. Unknown ids are ignored."""
        for request_id in request_ids:
            self._owners.pop(request_id, None)
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
