"""The asynchronous client."""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Unpack

import grpc
import grpc.aio

from twostroke.client._answer import models
from twostroke.client._attempts import Attempt
from twostroke.client._core import DEFAULT_RPC, Core
from twostroke.client._options import GenerateOptions, Prompt
from twostroke.client._retry import DEFAULT_RETRIES, RetryPolicy
from twostroke.client._stream import AsyncCall, AsyncStream, pause
from twostroke.client._types import Completion, Model
from twostroke.config import RpcSettings
from twostroke.errors import InvalidRequestError
from twostroke.rpc.channel import connect
from twostroke.rpc.trace_context import present
from twostroke.v1.inference_pb2 import GenerateRequest, ListModelsRequest
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from twostroke.v1.inference_pb2_grpc import InferenceServiceAsyncStub


class AsyncClient:
    """A client of one or several routers for asyncio. It belongs to one event loop.

    targets: host:port of the router, or of several; a call begins at the one that answered last, at first the first.
    timeout_s: seconds that a call may take, all attempts together; None waits for ever.
    retries: attempts after the first, each at the next router, or a whole policy. Only a router that is not there, or
        one that is full and says when to come back, is tried again, and only before a part of the answer has arrived.
    api_key: sent as a bearer token, in clear text.
    rpc: message sizes, keepalive and reconnection of the channels.

    Raises ConfigError naming the argument that cannot work. Connects on first use.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        timeout_s: float | None = None,
        retries: int | RetryPolicy = DEFAULT_RETRIES,
        api_key: str | None = None,
        rpc: RpcSettings = DEFAULT_RPC,
    ) -> None:
        self._core = Core(targets, timeout_s, retries, api_key, rpc)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closed = asyncio.Event()
        self._streams: weakref.WeakSet[AsyncStream] = weakref.WeakSet()

    async def __aenter__(self) -> AsyncClient:
        self._core.check_open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels the calls under way and closes the connections; idempotent. The client cannot be used again."""
        self._core.closed = True
        self._closed.set()
        for stream in list(self._streams):
            stream._leave("its client was closed")
        while self._channels:
            _, channel = self._channels.popitem()
            await channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """The answer to a prompt, piece by piece. Sends nothing yet; see AsyncStream for when it does.

        Raises InvalidRequestError at once for a wrong option. Iterating the stream raises
          InvalidRequestError  the router refuses it: UnsupportedFieldError, PromptTooLongError, UnknownModelError
          OverloadedError      there is no room; `retry_after_s` says when there may be
          UnavailableError     no router answers, or it has no worker (NoWorkerError), lost it (WorkerLostError), or
                               with it an answer that cannot be drawn again (AnswerLostError)
          DeadlineError        timeout_s has passed
          TwostrokeError       everything else.
        The notes of an error name the request id, the router and the attempts before.
        """
        request, attempts = self._core.generate(prompt, options)
        stream = AsyncStream(request.request_id, attempts, functools.partial(self._open, request))
        self._streams.add(stream)
        return stream

    async def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to a prompt. Raises what `generate` raises. Cancellation cancels the RPC."""
        async with self.generate(prompt, **options) as stream:
            async for _ in stream:
                pass
        return stream.completion

    async def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models that can be served now. Raises UnavailableError, DeadlineError, TwostrokeError."""
        attempts = self._core.attempts("ListModels", timeout_s)
        while True:
            attempt = attempts.begin()
            call = self._stub(attempt.target).ListModels(
                ListModelsRequest(), timeout=attempt.timeout_s, metadata=self._core.metadata
            )
            try:
                response = await call
            except grpc.RpcError as rpc_error:
                await pause(attempts.failed(rpc_error), self._closed)
            except asyncio.CancelledError:
                # gRPC raises it also when the channel is closed under the call.
                task = asyncio.current_task()
                if task is None or not task.cancelling():
                    self._core.check_open()
                raise
            else:
                attempts.answered()
                return models(response)

    def _open(self, request: GenerateRequest, attempt: Attempt) -> AsyncCall:
        metadata = (*self._core.metadata, *present())
        return self._stub(attempt.target).Generate(request, timeout=attempt.timeout_s, metadata=metadata)

    def _stub(self, target: str) -> InferenceServiceAsyncStub:
        self._core.check_open()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise InvalidRequestError("the client was used in another event loop before; make one client per loop")
        if target not in self._channels:
            self._channels[target] = connect(target, self._core.rpc)
        return InferenceServiceStub(self._channels[target])
