"""The router's end of a worker's decode session."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Callable
from typing import Any, Protocol, cast

import grpc.aio

from twostroke.errors import TwostrokeError, WorkerLostError
from twostroke.rpc.status import from_failure, to_error
from twostroke.v1 import decode_pb2 as pb
from twostroke.v1 import decode_pb2_grpc
from twostroke.v1.engine_pb2 import EngineRequest, Finish, Logprobs, PromptStats
from twostroke.v1.kv_pb2 import Handoff

log = logging.getLogger(__name__)


class SlotOwner(Protocol):
    """Whoever admitted a request. Called from the event loop, in the order of the engine's steps; must not block."""

    def tokens(self, token_ids: list[int], logprobs: Logprobs | None, finish: Finish | None) -> None:
        """New tokens, and with the last of them how the answer ended."""

    def prompt_ready(self, stats: PromptStats, prompt_logprobs: Logprobs | None) -> None:
        """The worker has the prompt's KV. Comes before the first tokens."""

    def failed(self, error: TwostrokeError) -> None:
        """The request is over on this worker without an end."""


class DecodeSession:
    """Admits, cancels, and fans the columns of each DecodeStep out to their owners.

    step_done is called after every step with all its rows delivered, so that a step can be passed on as a whole.
    """

    def __init__(
        self, channel: grpc.aio.Channel, router_id: str, worker: str, epoch: str, step_done: Callable[[], None]
    ) -> None:
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._worker = worker
        self._open = pb.SessionRequest(open=pb.SessionOpen(router_id=router_id, worker_epoch=epoch))
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._owners: dict[int, SlotOwner] = {}
        self._numbers = itertools.count(1)
        self._step_done = step_done
        self.broken = False
        """Whether it is over; its owners have been told."""

    @property
    def active(self) -> int:
        """Requests admitted and not over."""
        return len(self._owners)

    def admit(
        self,
        owner: SlotOwner,
        request: EngineRequest,
        handoff: Handoff | None,
        timeout_s: float | None,
        chunk_tokens: int = 0,
    ) -> int:
        """Sends a request to the worker; returns its slot. chunk_tokens: up to how many prompt tokens it may fill
        a step; 0 leaves it to the worker. Raises WorkerLostError when the session is broken."""
        if self.broken:
            raise WorkerLostError(f"worker {self._worker} is gone")
        slot = next(self._numbers)
        admit = pb.Admit(slot=slot, request=request, handoff=handoff, chunk_tokens=chunk_tokens)
        if timeout_s is not None:
            admit.timeout_ms = max(1, int(timeout_s * 1000))
        self._owners[slot] = owner
        self._outbox.put_nowait(pb.SessionRequest(admit=admit))
        return slot

    def cancel(self, slot: int) -> None:
        """Ends a request; its owner hears nothing more. Slots that are over are ignored."""
        if self._owners.pop(slot, None) is not None and not self.broken:
            self._outbox.put_nowait(pb.SessionRequest(cancel=pb.Cancel(slots=[slot])))

    async def run(self, opened: Callable[[], None]) -> None:
        """Opens the session, calls `opened` when the worker accepts it, and reads until it breaks.

        Raises TwostrokeError saying how it broke; all owners are told first. Cancellation closes the session, and the
        worker frees what it held for it.
        """
        call = self._stub.Session()
        error: TwostrokeError = WorkerLostError(f"worker {self._worker} closed the session")
        writer = asyncio.create_task(self._write(call), name=f"session {self._worker}, writing")
        try:
            while (received := await call.read()) is not grpc.aio.EOF:
                response = cast(pb.SessionResponse, received)
                if response.WhichOneof("message") == "step":
                    self._route(response.step)
                    self._step_done()
                else:
                    opened()
        except grpc.aio.AioRpcError as broken:
            error = to_error(broken)
        finally:
            writer.cancel()
            call.cancel()
            self._break(error)
        raise error

    async def _write(self, call: Any) -> None:
        # Not an iterator given to the call: one whose call ends while it waits cannot be closed.
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(self._open)
            while True:
                await call.write(await self._outbox.get())

    def _break(self, error: TwostrokeError) -> None:
        self.broken = True
        lost = WorkerLostError(f"worker {self._worker} was lost while writing the answer: {error.message}")
        owners, self._owners = list(self._owners.values()), {}
        for owner in owners:
            owner.failed(lost)
        self._step_done()

    def _route(self, step: pb.DecodeStep) -> None:
        for prompt in step.prompts:
            if owner := self._owners.get(prompt.slot):
                logprobs = prompt.prompt_logprobs if prompt.HasField("prompt_logprobs") else None
                owner.prompt_ready(prompt.stats, logprobs)
        finishes = {row.slot: row.finish for row in step.finishes}
        logprobs_of = {row.slot: row.logprobs for row in step.logprobs}
        start, counts, token_ids = 0, step.token_counts, step.token_ids
        for row, slot in enumerate(step.slots):
            end = start + (counts[row] if counts else 1)
            if owner := self._owners.get(slot):
                finish = finishes.pop(slot, None)
                if finish is not None:
                    del self._owners[slot]
                owner.tokens(token_ids[start:end], logprobs_of.get(slot), finish)
            start = end
        for slot, finish in finishes.items():
            if owner := self._owners.pop(slot, None):
                owner.tokens([], None, finish)
        for row_failure in step.failures:
            if owner := self._owners.pop(row_failure.slot, None):
                owner.failed(from_failure(row_failure.failure))
