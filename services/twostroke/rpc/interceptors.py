"""What every server does around every call, without touching a message.

Three things that grpc.aio leaves to the application: errors become statuses; a handler's own cancellation becomes a
status too, because a CancelledError that a handler lets escape leaves its client waiting for ever; and calls without a
deadline are refused where the service demands one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from twostroke.errors import EngineError, InvalidRequestError, TwostrokeError
from twostroke.rpc.status import abort

log = logging.getLogger(__name__)

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    _Context = grpc.aio.ServicerContext[Any, Any]
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]


class Guard(Protocol):
    """Says who may make a call."""

    def __call__(self, method: str, authorization: str, peer: str) -> None:
        """Raises the TwostrokeError that refuses it.

        method: full name; authorization: that header, or empty; peer: gRPC's name of the caller's address.
        """


class BoundaryInterceptor(grpc.aio.ServerInterceptor):
    """Maps errors, demands deadlines, and asks the guard.

    deadline_methods: full method names whose callers must set a deadline.
    """

    def __init__(self, deadline_methods: frozenset[str] = frozenset(), guard: Guard | None = None) -> None:
        self._deadline_methods = deadline_methods
        self._guard = guard
        self._calls: set[asyncio.Task[Any]] = set()

    async def ended(self, timeout_s: float) -> None:
        """Returns when every call's handler has, or after timeout_s.

        A stopped server has only asked its handlers to end. An event loop that closes before they have cancels grpc's
        own tasks too, and grpc.aio logs a traceback for each."""
        if self._calls:
            await asyncio.wait(self._calls, timeout=timeout_s)
            await asyncio.sleep(0)  # grpc's task around a handler ends a step after it

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Wraps the handler of one call."""
        task = asyncio.current_task()
        if task is not None:
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method.startswith("/grpc."):
            return handler

        def check(context: _Context) -> None:
            if self._guard is not None:
                metadata = dict(context.invocation_metadata() or ())
                self._guard(method, str(metadata.get("authorization", "")), context.peer())
            if method in self._deadline_methods and context.time_remaining() is None:
                raise InvalidRequestError(f"{method} needs a deadline; set a timeout on the call")

        if handler.response_streaming:
            inner = handler.stream_stream or handler.unary_stream
            make = (
                grpc.stream_stream_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_stream_rpc_method_handler
            )
            wrapped: Any = _streaming(inner, method, check)
        else:
            inner = handler.stream_unary or handler.unary_unary
            make = (
                grpc.stream_unary_rpc_method_handler
                if handler.request_streaming
                else grpc.unary_unary_rpc_method_handler
            )
            wrapped = _unary(inner, method, check)
        return make(wrapped, handler.request_deserializer, handler.response_serializer)


async def _fail(context: _Context, method: str, error: BaseException) -> None:
    if isinstance(error, TwostrokeError):
        await abort(context, error)
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        # Whose task is cancelled has no client any more, though its context may not say so yet. A status for nobody is
        # memory that grpc.aio never frees.
        if context.cancelled() or context.done() or (task is not None and task.cancelling()):
            raise error
        await abort(context, EngineError(f"{method} was cancelled by its own server"))
    log.error("%s failed", method, exc_info=error)
    await abort(context, EngineError(f"{method} failed: {type(error).__name__}: {error}"))


def _unary(inner: Any, method: str, check: Callable[[_Context], None]) -> Callable[[Any, _Context], Awaitable[Any]]:
    async def call(request: Any, context: _Context) -> Any:
        try:
            check(context)
            return await inner(request, context)
        except grpc.aio.AbortError:
            raise
        except BaseException as error:
            await _fail(context, method, error)

    return call


def _streaming(
    inner: Any, method: str, check: Callable[[_Context], None]
) -> Callable[[Any, _Context], AsyncIterator[Any]]:
    async def call(request: Any, context: _Context) -> AsyncIterator[Any]:
        messages: AsyncIterator[Any] = inner(request, context)
        try:
            check(context)
            async for message in messages:
                yield message
        except (grpc.aio.AbortError, GeneratorExit):
            raise
        except BaseException as error:
            await _fail(context, method, error)
        finally:
            await messages.aclose()  # type: ignore[attr-defined]

    return call
