"""The answer to one request as an asynchronous stream."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio

from twostroke.client._answer import Answer
from twostroke.client._attempts import Attempt, Attempts
from twostroke.client._types import Chunk
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse

AsyncCall: TypeAlias = grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse]


class AsyncStream(Answer):
    """The pieces of one answer, an asynchronous iterator of `Chunk`; after its end, the whole answer.

    Nothing is sent before the first iteration or `async with`; the deadline runs from there. Leaving early cancels the
    RPC and thereby frees everything the request holds: by `break`, an exception, the end of `async with`, `close`,
    cancellation of the task, or letting go of the stream. A stream that was left cannot be taken up again.

    One task reads a stream at a time. Iterating raises the errors of `AsyncClient.generate`.
    """

    def __init__(self, request_id: str, attempts: Attempts, open_call: Callable[[Attempt], AsyncCall]) -> None:
        super().__init__(request_id)
        self._attempts = attempts
        self._open_call = open_call
        self._call: AsyncCall | None = None
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._left = asyncio.Event()

    async def __aenter__(self) -> AsyncStream:
        """Sends the request; does not wait for the answer. Raises InvalidRequestError when the stream is over."""
        self._current_call()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return _Loop(self)

    async def __anext__(self) -> Chunk:
        try:
            chunk = await self._next_chunk()
        except asyncio.CancelledError:
            # gRPC raises it in the reader also when somebody else cancels the call.
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self._check_not_over()
            self._leave("its task was cancelled")
            raise
        except BaseException as error:
            self._leave(f"it failed with {type(error).__name__}")
            raise
        if chunk is None:
            self._finalize("")
            raise StopAsyncIteration
        return chunk

    async def close(self) -> None:
        """Cancels the RPC unless the answer has ended; idempotent. What has arrived stays readable."""
        self._leave("it was closed")

    def __del__(self) -> None:
        self._abandon()

    async def _next_chunk(self) -> Chunk | None:
        if self._over and self._end is not None:
            return None
        while (response := await self._next_response()) is not None:
            self._attempts.answered()
            if (chunk := self._fold(response)) is not None:
                return chunk
        if self._end is None:
            raise self._attempts.broken("the router ended the stream without saying why the answer ended")
        return None

    async def _next_response(self) -> GenerateResponse | None:
        while True:
            try:
                response = await self._current_call().read()
            except grpc.RpcError as rpc_error:
                # The answer is complete; how its RPC ended no longer matters to anyone.
                if self._end is not None:
                    return None
                self._call = None
                await pause(self._attempts.failed(rpc_error), self._left)
            else:
                return None if response is grpc.aio.EOF else cast(GenerateResponse, response)

    def _current_call(self) -> AsyncCall:
        self._check_not_over()
        if self._call is None:
            self._event_loop = asyncio.get_running_loop()
            self._call = self._open_call(self._attempts.begin())
        return self._call

    def _leave(self, why: str) -> None:
        if self._finalize(why):
            self._left.set()
            if self._call is not None:
                self._call.cancel()

    def _abandon(self) -> None:
        # Runs in a finalizer: in any thread, perhaps after the loop, and after a constructor that failed.
        call, loop = getattr(self, "_call", None), getattr(self, "_event_loop", None)
        if call is None or loop is None or not self._finalize("its loop was left"):
            return
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(call.cancel)


async def pause(delay_s: float, ended: asyncio.Event) -> None:
    """Waits that long, or until the event is set. Cancellation ends it."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(delay_s):
            await ended.wait()


class _Loop(AsyncIterator[Chunk]):
    """One `async for` over a stream. Only the loop holds it, so that leaving the loop is seen even while the caller
    holds the stream."""

    def __init__(self, stream: AsyncStream) -> None:
        self._stream = stream

    def __anext__(self) -> Coroutine[Any, Any, Chunk]:
        return self._stream.__anext__()

    def __del__(self) -> None:
        self._stream._abandon()
