"""The blocking client and its stream. They use gRPC's blocking API; no event loop is involved."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, Unpack

import grpc

from twostroke.client._answer import Answer, models
from twostroke.client._attempts import Attempt, Attempts
from twostroke.client._core import DEFAULT_RPC, Core
from twostroke.client._options import GenerateOptions, Prompt
from twostroke.client._retry import DEFAULT_RETRIES, RetryPolicy
from twostroke.client._types import Chunk, Completion, Model
from twostroke.config import RpcSettings
from twostroke.rpc.channel import connect_sync
from twostroke.rpc.trace_context import present
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse, ListModelsRequest
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub

if TYPE_CHECKING:
    from grpc import _CallIterator

    SyncCall: TypeAlias = _CallIterator[GenerateResponse]


class Stream(Answer):
    """The pieces of one answer, an iterator of `Chunk`; after its end, the whole answer.

    Nothing is sent before the first iteration or `with`; the deadline runs from there. Leaving early cancels the RPC
    and thereby frees everything the request holds: by `break`, an exception, the end of `with`, `close` (from any
    thread), or letting go of the stream. A stream that was left cannot be taken up again.

    One thread reads a stream at a time. Iterating raises the errors of `Client.generate`.
    """

    def __init__(self, client: Client, request: GenerateRequest, attempts: Attempts) -> None:
        super().__init__(request.request_id)
        self._client = client
        self._request = request
        self._attempts = attempts
        self._call: SyncCall | None = None
        self._left = threading.Event()

    def __enter__(self) -> Stream:
        """Sends the request; does not wait for the answer. Raises InvalidRequestError when the stream is over."""
        self._current_call()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Chunk]:
        return _Loop(self)

    def __next__(self) -> Chunk:
        try:
            chunk = self._next_chunk()
        except BaseException as error:
            self._leave(f"it failed with {type(error).__name__}")
            raise
        if chunk is None:
            self._finalize("")
            raise StopIteration
        return chunk

    def close(self) -> None:
        """Cancels the RPC unless the answer has ended; idempotent. What has arrived stays readable."""
        self._leave("it was closed")

    def __del__(self) -> None:
        self._abandon()

    def _next_chunk(self) -> Chunk | None:
        if self._over and self._end is not None:
            return None
        while (response := self._next_response()) is not None:
            self._attempts.answered()
            if (chunk := self._fold(response)) is not None:
                return chunk
        if self._end is None:
            raise self._attempts.broken("the router ended the stream without saying why the answer ended")
        return None

    def _next_response(self) -> GenerateResponse | None:
        while True:
            try:
                return next(self._current_call(), None)
            except grpc.RpcError as rpc_error:
                # The answer is complete; how its RPC ended no longer matters to anyone.
                if self._end is not None:
                    return None
                # Another thread may have closed the stream.
                self._check_not_over()
                self._call = None
                self._left.wait(self._attempts.failed(rpc_error))

    def _current_call(self) -> SyncCall:
        self._check_not_over()
        if self._call is None:
            attempt = self._attempts.begin()
            self._call = self._client._open(self._request, attempt)
            if self._over:
                # Closed by another thread that did not see the call yet.
                self._call.cancel()
                self._check_not_over()
        return self._call

    def _leave(self, why: str) -> None:
        if self._finalize(why):
            self._left.set()
            if self._call is not None:
                self._call.cancel()

    def _abandon(self) -> None:
        # Runs in a finalizer, also in that of a stream whose constructor failed.
        if getattr(self, "_call", None) is not None:
            self._leave("its loop was left")


class _Loop(Iterator[Chunk]):
    """One `for` over a stream. Only the loop holds it, so that leaving the loop is seen even while the caller holds the
    stream."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def __next__(self) -> Chunk:
        return self._stream.__next__()

    def __del__(self) -> None:
        self._stream._abandon()


class Client:
    """A blocking client of one or several routers. Threads may share it.

    The arguments are those of AsyncClient. Raises ConfigError naming the argument that cannot work. Connects on first
    use.
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
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._channels: dict[str, grpc.Channel] = {}
        self._streams: weakref.WeakSet[Stream] = weakref.WeakSet()

    def __enter__(self) -> Client:
        self._core.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Cancels the calls under way and closes the connections; idempotent. The client cannot be used again."""
        with self._lock:
            self._core.closed = True
            self._closed.set()
            channels, self._channels = self._channels, {}
            streams = list(self._streams)
        for stream in streams:
            stream._leave("its client was closed")
        for channel in channels.values():
            channel.close()

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Stream:
        """The answer to a prompt, piece by piece. Sends nothing yet; see Stream for when it does.

        Raises the errors of AsyncClient.generate, at the same points.
        """
        request, attempts = self._core.generate(prompt, options)
        stream = Stream(self, request, attempts)
        with self._lock:
            self._streams.add(stream)
        return stream

    def complete(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The whole answer to a prompt. Raises what `generate` raises."""
        with self.generate(prompt, **options) as stream:
            for _ in stream:
                pass
        return stream.completion

    def list_models(self, *, timeout_s: float | None = None) -> tuple[Model, ...]:
        """The models that can be served now. Raises UnavailableError, DeadlineError, TwostrokeError."""
        attempts = self._core.attempts("ListModels", timeout_s)
        while True:
            attempt = attempts.begin()
            stub = self._stub(attempt.target)
            try:
                with self._closed_is_told():
                    response = stub.ListModels(
                        ListModelsRequest(), timeout=attempt.timeout_s, metadata=self._core.metadata
                    )
            except grpc.RpcError as rpc_error:
                self._core.check_open()
                self._closed.wait(attempts.failed(rpc_error))
            else:
                attempts.answered()
                return models(response)

    def _open(self, request: GenerateRequest, attempt: Attempt) -> SyncCall:
        stub = self._stub(attempt.target)
        with self._closed_is_told():
            metadata = (*self._core.metadata, *present())
            return stub.Generate(request, timeout=attempt.timeout_s, metadata=metadata)

    @contextmanager
    def _closed_is_told(self) -> Iterator[None]:
        try:
            yield
        except ValueError:
            # gRPC's answer to a call on a channel that another thread closes at the same time.
            self._core.check_open()
            raise

    def _stub(self, target: str) -> InferenceServiceStub:
        with self._lock:
            self._core.check_open()
            if target not in self._channels:
                self._channels[target] = connect_sync(target, self._core.rpc)
            return InferenceServiceStub(self._channels[target])
