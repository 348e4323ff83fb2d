"""PrefillService over an engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from twostroke.engine.base import EngineOutput, Stroke
from twostroke.errors import EngineError, TwostrokeError
from twostroke.v1 import prefill_pb2 as pb
from twostroke.v1 import prefill_pb2_grpc
from twostroke.worker.host import EngineHost


class _Call:
    """The owner of one prefill: a queue of its outputs."""

    def __init__(self) -> None:
        self._outputs: asyncio.Queue[EngineOutput | TwostrokeError] = asyncio.Queue()

    def deliver(self, output: EngineOutput) -> None:
        self._outputs.put_nowait(output)

    def flush(self) -> None:
        """Every output travels by itself."""

    def lost(self, error: TwostrokeError) -> None:
        self._outputs.put_nowait(error)

    async def next(self) -> EngineOutput:
        output = await self._outputs.get()
        if isinstance(output, TwostrokeError):
            raise output
        if output.failure is not None:
            raise output.failure
        return output


class PrefillService(prefill_pb2_grpc.PrefillServiceServicer):
    """Runs prompts on the host's engine."""

    def __init__(self, host: EngineHost) -> None:
        self._host = host

    async def Prefill(
        self, request: pb.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.PrefillResponse]:
        """One prompt. Cancellation ends the request and frees its KV, unless `finished` was already sent."""
        self._host.check_epoch(request.worker_epoch)
        request_id = request.request.request_id
        call = _Call()
        await self._host.admit(request.request, Stroke.PREFILL, call, chunk_tokens=request.chunk_tokens)
        complete = False
        try:
            yield pb.PrefillResponse(queued=pb.PrefillQueued())
            started = False
            while not complete:
                output = await call.next()
                if output.started and not started:
                    started = True
                    early = output.handoff if not output.done else None
                    yield pb.PrefillResponse(started=pb.PrefillStarted(handoff=early))
                if output.handoff is not None and output.done:
                    self._host.hold(request.router_id, request_id)
                for event in _events(output):
                    yield event
                complete = output.done
        finally:
            if not complete:
                await self._host.cancel([request_id])

    async def Release(
        self, request: pb.ReleaseRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ReleaseResponse:
        """Frees held KV."""
        return pb.ReleaseResponse(released=await self._host.release(request.request_ids))


def _events(output: EngineOutput) -> list[pb.PrefillResponse]:
    events = []
    if output.token_ids:
        if len(output.token_ids) != 1:
            raise EngineError(f"prefill of {output.request_id} brought {len(output.token_ids)} tokens instead of one")
        first = pb.PrefillFirstToken(
            token_id=output.token_ids[0],
            logprobs=output.logprobs,
            prompt_logprobs=output.prompt_logprobs,
            finish=output.finish,
            stats=output.prompt,
        )
        events.append(pb.PrefillResponse(first_token=first))
    if output.done:
        events.append(pb.PrefillResponse(finished=pb.PrefillFinished(handoff=output.handoff)))
    return events
