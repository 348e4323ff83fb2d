"""One attempt at a request: prefill, hand over, decode.

Decode is admitted as soon as prefill starts, where the KV can be fetched while it is computed. When a decode worker
fails and prefill has the KV still, another one takes the same hand-off.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from twostroke.errors import (
    KvCorruptError,
    KvLostError,
    NoWorkerError,
    OverloadedError,
    StaleEpochError,
    TwostrokeError,
    UnavailableError,
    WorkerLostError,
)
from twostroke.policy.plan import Plan
from twostroke.policy.snapshot import ClusterSnapshot, with_prompt_on
from twostroke.router.decode_stroke import DecodeStroke
from twostroke.router.member import Member
from twostroke.router.pool import WorkerPool
from twostroke.router.prefill_stroke import PrefillStroke
from twostroke.router.progress import Progress
from twostroke.v1.engine_pb2 import EngineRequest, Finish, Logprobs, PromptStats
from twostroke.v1.prefill_pb2 import PrefillFirstToken

log = logging.getLogger(__name__)

# Another worker, or the same one again, may well succeed.
RETRYABLE = (UnavailableError, StaleEpochError, KvLostError, KvCorruptError, OverloadedError)
# What the way between two workers may have done.
LINK_ERRORS = (KvLostError, KvCorruptError)


class Attempt:
    """Runs once. attempt_id: names the request, and its hand-off, on the workers.

    handoff_timeout_s: how long decode may take from the end of prefill to get the prompt's KV.
    chunk_tokens: most prompt tokens in one step where the prompt is computed; 0 leaves it to the worker.
    """

    def __init__(
        self, attempt_id: str, progress: Progress, pool: WorkerPool, handoff_timeout_s: float, chunk_tokens: int = 0
    ) -> None:
        self._id = attempt_id
        self._progress = progress
        self._pool = pool
        self._handoff_timeout_s = handoff_timeout_s
        self._chunk_tokens = chunk_tokens
        self._prefill: PrefillStroke | None = None
        self._decode: DecodeStroke | None = None
        self._suspected: list[tuple[tuple[str, str], TwostrokeError]] = []

    async def alone(self, member: Member) -> None:
        """Both strokes on one worker. Raises what ended it; cancellation frees everything."""
        try:
            self._decode = self._admit(member)
            await self._decode.over
        except OverloadedError:
            raise
        except RETRYABLE:
            self._failed(member)
            raise
        finally:
            self._leave_decode()

    async def two_strokes(self, source: Member, decode: Member) -> None:
        """Each stroke on a worker of its own. Raises what ended it; cancellation frees everything on all of them."""
        progress, handoffs = self._progress, self._pool.handoffs
        progress.trail.prefill_worker_id = source.worker_id
        handoffs.offer(self._id, source)
        self._pool.used(source.address)
        prefill = self._prefill = PrefillStroke(
            source, self._for_prefill(), progress.remaining_s(), self._chunk_tokens, self._first_token
        )
        try:
            await self._hand_over(prefill, decode)
        except RETRYABLE as error:
            if prefill.broken:
                self._failed(source)
            elif isinstance(error, LINK_ERRORS):
                progress.failed_on.add(source.address)
            raise
        finally:
            source_lost = prefill.broken
            prefill.close()
            if prefill.ended_answer:
                handoffs.absent(self._id)
            handoffs.close(self._id, source_lost=source_lost)

    def _for_prefill(self) -> EngineRequest:
        """The request, or for a later attempt one that only computes the prompt: its token is not used, so nothing may
        end it."""
        request = self._progress.copy(self._id)
        if self._progress.delivered:
            request.sampling.Clear()
            request.sampling.ignore_eos = True
            request.sampling.max_tokens = 2
        return request

    def _first_token(self, first: PrefillFirstToken) -> None:
        progress = self._progress
        self._pool.inflight.prompt_done(progress.ticket)
        if self._prefill is not None:
            self._pool.worked(self._prefill.member.address, well=True)
        progress.trail.prefill_ended_s = time.monotonic()
        progress.trail.prefill_queue_ms, progress.trail.prefill_run_ms = first.stats.queue_ms, first.stats.run_ms
        # A later attempt's is not used: the client has this token and maybe more, and decode continues from those.
        if not progress.delivered:
            progress.deliver(
                [first.token_id],
                first.logprobs if first.HasField("logprobs") else None,
                first.finish if first.HasField("finish") else None,
                prompt=first.stats,
                prompt_logprobs=first.prompt_logprobs if first.HasField("prompt_logprobs") else None,
            )
        if progress.ended:
            return
        self._blame_links()
        if self._decode is not None:
            self._decode.let_go()

    async def _hand_over(self, prefill: PrefillStroke, decode: Member | None) -> None:
        """Runs the second stroke, on another worker when one fails and prefill has the KV still."""
        tried: set[tuple[str, bool]] = set()
        while (handoff := await prefill.offer()) is not None:
            assert decode is not None
            tried.add((decode.address, handoff.in_progress))
            try:
                await self._write(prefill, decode)
                return
            except RETRYABLE as error:
                if self._progress.ended:
                    return
                if error is not prefill.error:
                    self._suspect(prefill, decode, error)
                if prefill.broken or self._pool.handoffs.was_received(self._id):
                    raise
                if isinstance(error, OverloadedError):
                    decode = await self._where_room_comes(prefill, decode)
                else:
                    decode = await self._another(prefill, tried, error)
                if decode is None and not self._progress.ended:
                    raise
                log.warning("request %s: its hand-off goes elsewhere: %s", self._id, error)
        if not self._progress.ended:
            raise WorkerLostError(f"prefill worker {prefill.member.worker_id} ended without KV and without an end")

    def _suspect(self, prefill: PrefillStroke, decode: Member, error: TwostrokeError) -> None:
        if isinstance(error, OverloadedError):
            return
        if not isinstance(error, LINK_ERRORS):
            self._failed(decode)
            return
        self._suspected.append(((prefill.member.address, decode.address), error))
        # Until prefill has come through, there may have been nothing to read: its worker died, or the answer ended.
        if prefill.has_first_token:
            self._blame_links()

    def _failed(self, member: Member) -> None:
        # A request that fails here again and again says no more than the first time.
        if member.address not in self._progress.failed_on:
            self._progress.failed_on.add(member.address)
            self._pool.worked(member.address, well=False)

    def _blame_links(self) -> None:
        for pair, error in self._suspected:
            self._pool.links.failed(pair, error)
        self._suspected.clear()

    async def _another(
        self, prefill: PrefillStroke, tried: set[tuple[str, bool]], error: TwostrokeError
    ) -> Member | None:
        """A decode worker for a hand-off that others failed at. Each may try while prefill computes, and afterwards."""
        # Who cannot read may have found out that nothing is being written.
        patience_s = self._handoff_timeout_s if isinstance(error, LINK_ERRORS) else None
        while (handoff := prefill.handoff) is not None:
            found = self._untried(prefill.member, {address for address, early in tried if early is handoff.in_progress})
            if found is not None or not handoff.in_progress:
                return found
            await asyncio.wait({prefill.ended}, timeout=patience_s)
            if not prefill.ended.done():
                return None
            await prefill.ended
        return None

    async def _where_room_comes(self, prefill: PrefillStroke, refuser: Member) -> Member | None:
        """A decode worker with room, after another router was faster at the one that was chosen; None when there is
        none to wait for, or nothing to hand over any more."""
        progress, tried = self._progress, {refuser.address}
        self._pool.inflight.ended(progress.ticket)
        while not (progress.ended or prefill.broken):
            try:
                plan = self._pool.place_answer(progress.placement(), self._seen_from(prefill.member, tried))
                if plan.prefill is not None:
                    return self._moved(prefill.member, plan)
            except NoWorkerError:
                if not tried:
                    return None
            tried = set()
            await self._pool.wait_report()
        return None

    def _moved(self, source: Member, plan: Plan) -> Member | None:
        progress, inflight, prefill = self._progress, self._pool.inflight, self._prefill
        inflight.placed(progress.ticket, progress.placement(), replace(plan, prefill=source.address), time.monotonic())
        if prefill is not None and prefill.has_first_token:
            inflight.prompt_done(progress.ticket)
        return self._pool.member(plan.decode)

    def _untried(self, source: Member, tried: set[str]) -> Member | None:
        try:
            seen = self._seen_from(source, tried)
            plan = self._pool.place_answer(self._progress.placement(), seen, waits=False)
        except NoWorkerError:
            return None
        return self._moved(source, plan) if plan.prefill is not None else None

    def _seen_from(self, source: Member, tried: set[str]) -> ClusterSnapshot:
        return with_prompt_on(source.address, self._pool.snapshot(), tried)

    def _admit(self, member: Member) -> DecodeStroke:
        """Starts the second stroke, or both."""
        assert member.info is not None
        progress = self._progress
        handoff = self._prefill.handoff if self._prefill else None
        request = progress.copy(self._id)
        request.output_token_ids.extend(progress.delivered)
        progress.block_tokens = member.info.layout.block_size_tokens
        stroke = DecodeStroke(self, member, handoff, hold_back=handoff is not None and not progress.delivered)
        self._pool.used(member.address)
        stroke.admit(request, progress.remaining_s(), 0 if handoff else self._chunk_tokens)
        progress.trail.admitted_on = member.worker_id
        if handoff is not None:
            # A worker that takes it has the blocks for it, and its reports count them soon.
            self._pool.inflight.arrived(progress.ticket, time.monotonic())
            progress.trail.handoff_begun_s, progress.trail.handoff_ready_s = time.monotonic(), None
            self._pool.handoffs.receive(self._id, member)
        return stroke

    def _leave_decode(self) -> None:
        if self._decode is not None:
            self._decode.cancel()
            self._decode = None

    async def _write(self, prefill: PrefillStroke, member: Member) -> None:
        """Runs the second stroke to the end of the answer, while the first one may still run."""
        try:
            stroke = self._decode = self._admit(member)
            await asyncio.wait({stroke.over, prefill.ended}, return_when=asyncio.FIRST_COMPLETED)
            if not stroke.over.done():
                # Decode may have all of the prompt; what it writes is of no use without the first token.
                needed = not (self._progress.delivered and stroke.ready.done())
                if prefill.broken and needed and not prefill.has_first_token:
                    await prefill.ended
                if self._progress.ended:
                    return
                if prefill.broken:
                    log.warning("request %s: prefill was lost after its first token; decode may have it all", self._id)
                await self._wait_for_prompt(stroke)
            await stroke.over
        finally:
            self._leave_decode()
            self._pool.handoffs.refused(self._id)

    async def _wait_for_prompt(self, stroke: DecodeStroke) -> None:
        try:
            async with asyncio.timeout(self._handoff_timeout_s):
                await asyncio.wait({stroke.over, stroke.ready}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise KvLostError(
                f"decode worker {stroke.member.worker_id} did not have the prompt's KV {self._handoff_timeout_s:g} s "
                "after prefill had ended (--handoff-timeout-s)"
            ) from None

    def prompt_ready(self, stats: PromptStats) -> None:
        """See Listener."""
        trail, prefill, decode = self._progress.trail, self._prefill, self._decode
        assert decode is not None
        trail.decode_worker_id = decode.member.worker_id
        trail.decode_started_s = time.monotonic()
        trail.decode_computed_tokens = stats.computed_tokens
        trail.transferred_tokens = stats.transferred_tokens
        if prefill is None:
            self._pool.inflight.prompt_done(self._progress.ticket)
            self._pool.inflight.arrived(self._progress.ticket, trail.decode_started_s)
            trail.prefill_queue_ms, trail.prefill_run_ms = stats.queue_ms, stats.run_ms
            trail.prefill_worker_id = trail.decode_worker_id
        elif prefill.handoff is not None:
            trail.handoff_ready_s = trail.decode_started_s
            trail.handoff_bytes, trail.handoff_blocks = prefill.handoff.bytes, prefill.handoff.blocks
            trail.handoff_chunks = stats.transfer_chunks
            if stats.transferred_tokens:
                trail.transferred_bytes = prefill.handoff.bytes
            if found := self._pool.links.report((prefill.member.address, decode.member.address)):
                trail.handoff_lanes, trail.link_bytes_per_s = tuple(found.lanes), found.bytes_per_s
            self._pool.links.succeeded((prefill.member.address, decode.member.address))
            self._pool.handoffs.received(self._id)

    def deliver(
        self,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finish: Finish | None,
        prompt: PromptStats | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        """See Listener."""
        self._pool.inflight.wrote(self._progress.ticket, len(token_ids))
        if finish is not None and self._decode is not None:
            self._pool.worked(self._decode.member.address, well=True)
        self._progress.deliver(token_ids, logprobs, finish, prompt, prompt_logprobs)
