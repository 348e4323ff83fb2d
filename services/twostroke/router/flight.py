"""One request's way through the cluster: place, prefill, hand over, decode, and again when a worker fails.

Whatever fails, tokens that the client has are never sent again: the next attempt carries them, and the engine continues
from them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import grpc.aio

from twostroke.errors import (
    KvCorruptError,
    KvLostError,
    OverloadedError,
    StaleEpochError,
    TwostrokeError,
    UnavailableError,
    WorkerLostError,
)
from twostroke.policy.placement import PlacementRequest, place
from twostroke.router.member import Member, MemberState
from twostroke.router.output import Output, Trail
from twostroke.router.pool import WorkerPool
from twostroke.rpc.status import to_error
from twostroke.v1.engine_pb2 import EngineRequest, Finish, Logprobs, PromptStats
from twostroke.v1.kv_pb2 import Handoff
from twostroke.v1.prefill_pb2 import PrefillFirstToken, PrefillRequest

log = logging.getLogger(__name__)

# Another worker, or the same one again, may well succeed.
RETRYABLE = (UnavailableError, StaleEpochError, KvLostError, KvCorruptError, OverloadedError)


class Flight:
    """A request in the air. `emit` takes its outputs, in order."""

    def __init__(
        self,
        request: EngineRequest,
        pool: WorkerPool,
        emit: Callable[[Output], None],
        *,
        attempts: int,
        deadline_s: float,
        handoff_timeout_s: float,
    ) -> None:
        self.request_id = request.request_id
        self.trail = Trail()
        self._request = request
        self._pool = pool
        self._emit = emit
        self._attempts = attempts
        self._deadline_s = deadline_s
        self._handoff_timeout_s = handoff_timeout_s
        self._delivered: list[int] = []
        self._failed_on: set[str] = set()
        self._ended = False
        self._block_tokens = 1

    @property
    def recomputed(self) -> bool:
        """Whether decode computed more of a transferred prompt than the one block that a hand-off may leave."""
        return bool(self.trail.transferred_tokens) and self.trail.decode_computed_tokens > self._block_tokens

    async def run(self) -> None:
        """Flies to the end. Raises the TwostrokeError that ended it; cancellation frees everything on every worker."""
        for attempt in range(1, self._attempts + 1):
            self.trail.attempts = attempt
            try:
                await self._attempt(attempt)
                return
            except RETRYABLE as error:
                if attempt == self._attempts or self._remaining_s() <= 0:
                    raise
                log.warning("request %s: attempt %d failed, placing it again: %s", self.request_id, attempt, error)
            finally:
                self.trail.finished_s = time.monotonic()

    def _remaining_s(self) -> float:
        return self._deadline_s - time.monotonic()

    async def _attempt(self, attempt: int) -> None:
        placement = PlacementRequest(len(self._request.prompt_token_ids), frozenset(self._failed_on))
        plan = place(placement, self._pool.snapshot())
        self.trail.placed_s = time.monotonic()
        decode = self._member(plan.decode)
        request = EngineRequest()
        request.CopyFrom(self._request)
        request.request_id = f"{self.request_id}.{attempt}"
        prefill = self._member(plan.prefill) if plan.prefill else None
        handoff = None
        try:
            if prefill is not None:
                handoff = await self._prefill(prefill, request)
                if handoff is None:
                    return
        except RETRYABLE:
            self._failed_on.add(prefill.address if prefill else decode.address)
            raise
        try:
            await self._decode(decode, prefill, request, handoff)
        except RETRYABLE:
            self._failed_on.add(decode.address)
            raise

    def _member(self, address: str) -> Member:
        member = self._pool.member(address)
        if member is None or member.state is not MemberState.READY:
            raise WorkerLostError(f"worker {address} went away between placement and use")
        return member

    async def _prefill(self, member: Member, request: EngineRequest) -> Handoff | None:
        """Runs the first stroke. Returns the KV on offer, or None when the first token ended the answer."""
        assert member.info is not None
        self.trail.prefill_worker_id = member.worker_id
        prompt_tokens = len(request.prompt_token_ids)
        member.prefill_tokens += prompt_tokens
        call = member.prefill.Prefill(
            PrefillRequest(request=self._for_prefill(request), worker_epoch=member.info.epoch),
            timeout=max(0.001, self._remaining_s()),
        )
        handoff: Handoff | None = None
        complete = False
        try:
            async for response in call:
                event = response.WhichOneof("event")
                if event == "first_token":
                    self._first_token(response.first_token)
                elif event == "finished" and response.finished.HasField("handoff"):
                    handoff = response.finished.handoff
            complete = True
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error
        finally:
            member.prefill_tokens -= prompt_tokens
            call.cancel()
            if not complete:
                # The worker may have finished in the moment in which we gave up.
                member.release(request.request_id)
        if handoff is None and not self._ended:
            raise WorkerLostError(f"prefill worker {member.worker_id} ended the call without KV and without an end")
        return handoff

    def _for_prefill(self, request: EngineRequest) -> EngineRequest:
        """The request, or for a later attempt one that only computes the prompt: its token is not used, so nothing may
        end it."""
        if not self._delivered:
            return request
        bare = EngineRequest()
        bare.CopyFrom(request)
        bare.sampling.Clear()
        bare.sampling.ignore_eos = True
        bare.sampling.max_tokens = 2
        return bare

    def _first_token(self, first: PrefillFirstToken) -> None:
        self.trail.prefill_queue_ms, self.trail.prefill_run_ms = first.stats.queue_ms, first.stats.run_ms
        if self._delivered:
            # A later attempt: the client has this token and maybe more; decode continues from those.
            return
        self._deliver(
            [first.token_id],
            first.logprobs if first.HasField("logprobs") else None,
            first.finish if first.HasField("finish") else None,
            prompt=first.stats,
            prompt_logprobs=first.prompt_logprobs if first.HasField("prompt_logprobs") else None,
        )

    async def _decode(
        self, member: Member, source: Member | None, request: EngineRequest, handoff: Handoff | None
    ) -> None:
        """Runs the second stroke to the end of the answer."""
        if member.session is None or member.info is None:
            raise WorkerLostError(f"decode worker {member.worker_id} went away before it was admitted")
        request.output_token_ids.extend(self._delivered)
        self.trail.decode_worker_id = member.worker_id
        self._block_tokens = member.info.layout.block_size_tokens
        stroke = _DecodeStroke(self, source, handoff)
        slot = member.session.admit(stroke, request, handoff, self._remaining_s())
        session = member.session
        try:
            await self._wait_for_prompt(stroke, member)
            await stroke.over
        finally:
            session.cancel(slot)
            stroke.release()

    async def _wait_for_prompt(self, stroke: _DecodeStroke, member: Member) -> None:
        try:
            async with asyncio.timeout(self._handoff_timeout_s):
                await asyncio.wait({stroke.over, stroke.ready}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise KvLostError(
                f"decode worker {member.worker_id} did not have the prompt's KV within {self._handoff_timeout_s:g} s "
                "(--handoff-timeout-s)"
            ) from None

    def _deliver(
        self,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finish: Finish | None,
        prompt: PromptStats | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        if self.trail.first_token_s is None and token_ids:
            self.trail.first_token_s = time.monotonic()
        self._delivered.extend(token_ids)
        if finish is not None:
            self._ended = True
            self.trail.finished_s = time.monotonic()
        self._emit(Output(self.request_id, token_ids, logprobs, prompt, prompt_logprobs, finish))


class _DecodeStroke:
    """One admission on one decode worker; hears of every step."""

    def __init__(self, flight: Flight, source: Member | None, handoff: Handoff | None) -> None:
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._flight = flight
        self._source = source
        self._handoff = handoff
        self._prompt: tuple[PromptStats, Logprobs | None] | None = None

    def prompt_ready(self, stats: PromptStats, prompt_logprobs: Logprobs | None) -> None:
        if not self.ready.done():
            self.ready.set_result(None)
        trail = self._flight.trail
        trail.decode_started_s = time.monotonic()
        trail.decode_computed_tokens = stats.computed_tokens
        trail.transferred_tokens = stats.transferred_tokens
        if self._handoff is not None and stats.transferred_tokens:
            trail.transferred_bytes = self._handoff.bytes
        if self._handoff is None:
            trail.prefill_queue_ms, trail.prefill_run_ms = stats.queue_ms, stats.run_ms
            trail.prefill_worker_id = trail.decode_worker_id
            self._prompt = (stats, prompt_logprobs)
        self.release()

    def tokens(self, token_ids: list[int], logprobs: Logprobs | None, finish: Finish | None) -> None:
        stats, prompt_logprobs = self._prompt or (None, None)
        self._prompt = None
        self._flight._deliver(token_ids, logprobs, finish, stats, prompt_logprobs)
        if finish is not None and not self.over.done():
            self.over.set_result(None)

    def failed(self, error: TwostrokeError) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    def release(self) -> None:
        """Frees the KV on prefill, once: it was read, or nobody will."""
        if self._handoff is not None and self._source is not None:
            self._source.release(self._handoff.handoff_id)
            self._source = None
