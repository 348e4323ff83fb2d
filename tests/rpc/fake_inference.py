"""An InferenceService that does what a test tells it, and remembers what it was asked.

What it sees are futures, which both kinds of test can wait for: `within(future)` in a blocking one, and
`await seen(future)` in an asynchronous one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc.aio

from twostroke.client import Chunk, RetryPolicy
from twostroke.errors import TwostrokeError, UnavailableError
from twostroke.rpc.status import abort
from twostroke.v1.engine_pb2 import FINISH_REASON_LENGTH, Finish
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse, ListModelsResponse, Model, Timeline, Usage
from twostroke.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server

WAIT_S = 20.0
FAST = RetryPolicy(retries=3, backoff_s=0.001)
HELLO = [Chunk("Hel", (1,)), Chunk("lo", (2,))]
"""What a fake without a script answers."""
LAST = GenerateResponse(
    finish=Finish(reason=FINISH_REASON_LENGTH),
    usage=Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1),
    timeline=Timeline(prefill_worker_id="p-1", decode_worker_id="d-1", attempts=1, finished_ms=7.5),
)

T = TypeVar("T")


def piece(text: str, *token_ids: int) -> GenerateResponse:
    return GenerateResponse(text=text, token_ids=token_ids)


@dataclass
class Answering:
    """What a call gets: pieces, then an error, silence until the client leaves, or the end."""

    pieces: Sequence[GenerateResponse] = ()
    error: TwostrokeError | None = None
    hang: bool = False
    left: Future[str] = field(default_factory=Future)
    """Becomes the request id when the client has left a call that hangs."""


def gone(retry_after_s: float = 0.0) -> Answering:
    """A router that leaves, and says when to come back."""
    return Answering(error=UnavailableError("draining", retry_after_s=retry_after_s))


def hanging() -> Answering:
    """One piece, and then silence."""
    return Answering([piece("a", 1)], hang=True)


@dataclass
class Received:
    """A call as it arrived. remaining_s: time before its deadline; None without one."""

    request: GenerateRequest
    metadata: dict[str, str]
    remaining_s: float | None


class FakeInference(InferenceServiceServicer):
    """Answers calls from `script`, one entry a call, the last one for ever."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.target = ""
        self.script = [Answering([piece("Hel", 1), piece("lo", 2), LAST])]
        self.received: list[Received] = []
        self.arrived: Future[None] = Future()
        self._calls = 0

    async def Generate(self, request, context):  # type: ignore[no-untyped-def]
        answering = self._next(request, context)
        for response in answering.pieces:
            yield response
        await self._finish(answering, request.request_id, context)

    async def ListModels(self, request, context):  # type: ignore[no-untyped-def]
        await self._finish(self._next(GenerateRequest(), context), "ListModels", context)
        return ListModelsResponse(models=[Model(name=self.name, max_model_len_tokens=4096)])

    def _next(self, request: GenerateRequest, context: grpc.aio.ServicerContext) -> Answering:
        remaining_s = context.time_remaining()
        self.received.append(Received(request, dict(context.invocation_metadata()), remaining_s))
        if not self.arrived.done():
            self.arrived.set_result(None)
        answering = self.script[min(self._calls, len(self.script) - 1)]
        self._calls += 1
        return answering

    async def _finish(self, answering: Answering, request_id: str, context: grpc.aio.ServicerContext) -> None:
        if answering.error is not None:
            await abort(context, answering.error)
        if answering.hang:
            try:
                await asyncio.Event().wait()
            finally:
                answering.left.set_result(request_id)


@asynccontextmanager
async def serving(*fakes: FakeInference) -> AsyncIterator[None]:
    """Serves each fake on a port of its own, and sets their targets."""
    servers = []
    for fake in fakes:
        server = grpc.aio.server()
        add_InferenceServiceServicer_to_server(fake, server)
        fake.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
    try:
        yield
    finally:
        for server in servers:
            await server.stop(0)


@contextmanager
def serving_in_thread(*fakes: FakeInference) -> Iterator[None]:
    """Serves the fakes in a thread with its own event loop."""
    ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def main() -> None:
        async with serving(*fakes):
            stop = asyncio.Event()
            ready.set_result((asyncio.get_running_loop(), stop))
            await stop.wait()

    with ThreadPoolExecutor(1) as executor:
        done = executor.submit(asyncio.run, main())
        done.add_done_callback(lambda _: ready.done() or ready.cancel())
        loop, stop = ready.result(WAIT_S)
        try:
            yield
        finally:
            loop.call_soon_threadsafe(stop.set)
            done.result(WAIT_S)


def within(future: Future[T]) -> T:
    return future.result(WAIT_S)


async def seen(future: Future[T]) -> T:
    return await asyncio.wait_for(asyncio.wrap_future(future), WAIT_S)
