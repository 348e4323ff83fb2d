"""The first stroke of a request: one prompt on one prefill worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc.aio

from twostroke.errors import EngineError, TwostrokeError, WorkerLostError
from twostroke.router.member import Member
from twostroke.rpc.status import to_error
from twostroke.rpc.trace_context import metadata
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.kv_pb2 import Handoff
from twostroke.v1.prefill_pb2 import PrefillFirstToken, PrefillRequest


class PrefillStroke:
    """Runs from its making to `close`. chunk_tokens: most prompt tokens in one step; 0 leaves it to the worker.
    on_first_token is called with the first token the moment it comes."""

    def __init__(
        self,
        member: Member,
        request: EngineRequest,
        timeout_s: float,
        chunk_tokens: int,
        on_first_token: Callable[[PrefillFirstToken], None],
    ) -> None:
        assert member.info is not None
        self.member = member
        self.handoff: Handoff | None = None
        """The KV on offer: as it was when prefill started, where it can be read while prefill runs, then as it is."""
        self.has_first_token = False
        self.ended_answer = False
        """The first token was the last."""
        self._on_first_token = on_first_token
        self._abandoned = ""
        self._offered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._call = member.prefill.Prefill(
            PrefillRequest(
                request=request,
                worker_epoch=member.info.epoch,
                router_id=member.router_id,
                chunk_tokens=chunk_tokens,
            ),
            timeout=max(0.001, timeout_s),
            metadata=metadata(request.trace_context),
        )
        self.ended = asyncio.get_running_loop().create_task(self._run(), name=f"prefill {request.request_id}")
        """Done when the worker has said everything; it raises what broke the call."""
        member.prefills.add(self._abandon)
        self.ended.add_done_callback(self._done)

    async def offer(self) -> Handoff | None:
        """The KV on offer, as soon as there is any; None when there will be none, since the first token is the last.

        Raises what broke the call.
        """
        await asyncio.wait({self._offered, self.ended}, return_when=asyncio.FIRST_COMPLETED)
        if self.handoff is None:
            await self.ended
        return self.handoff

    @property
    def broken(self) -> bool:
        """Whether the call ended without the worker's having said everything."""
        return self.error is not None

    @property
    def error(self) -> BaseException | None:
        """What broke the call, if anything did."""
        return self.ended.exception() if self.ended.done() and not self.ended.cancelled() else None

    def close(self) -> None:
        """Cancels what still runs."""
        self._call.cancel()
        self.ended.cancel()
        self._leave()

    async def _run(self) -> None:
        try:
            async for response in self._call:
                event = response.WhichOneof("event")
                if event == "started" and response.started.HasField("handoff"):
                    self._offer(response.started.handoff)
                elif event == "first_token":
                    self._first_token(response.first_token)
                elif event == "finished" and response.finished.HasField("handoff"):
                    self._offer(response.finished.handoff)
        except grpc.aio.AioRpcError as error:
            raise self._lost(error) from error
        except asyncio.CancelledError:
            if self._abandoned:
                raise WorkerLostError(self._abandoned) from None
            raise

    def _done(self, task: asyncio.Task[None]) -> None:
        self._leave()
        if not task.cancelled():
            # Nobody asks for it once the answer is complete.
            task.exception()

    def _leave(self) -> None:
        self.member.prefills.discard(self._abandon)

    def _abandon(self, reason: str) -> None:
        self._abandoned = reason
        self._call.cancel()

    def _offer(self, handoff: Handoff) -> None:
        self.handoff = handoff
        if not self._offered.done():
            self._offered.set_result(None)

    def _first_token(self, first: PrefillFirstToken) -> None:
        self.has_first_token = True
        if first.HasField("finish"):
            self.ended_answer = True
            # What was on offer early is not any more.
            self.handoff = None
        self._on_first_token(first)

    def _lost(self, error: grpc.aio.AioRpcError) -> Exception:
        if self._abandoned:
            return WorkerLostError(self._abandoned)
        cause = to_error(error)
        if isinstance(cause, EngineError) or type(cause) is TwostrokeError:
            # The request did nothing wrong. Another worker has another engine; one that ends cancels its calls.
            return WorkerLostError(f"prefill worker {self.member.worker_id} failed: {cause.message}")
        return cause
