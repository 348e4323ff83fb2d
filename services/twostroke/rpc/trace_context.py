"""W3C trace context in gRPC metadata, without touching a message."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]

KEYS = frozenset({"traceparent", "tracestate"})

incoming: ContextVar[Mapping[str, str] | None] = ContextVar("incoming_trace_context", default=None)
"""The trace context that came with the call whose handler runs; None when none did."""


class TraceContextInterceptor(grpc.aio.ServerInterceptor):
    """Sets `incoming` for each call's handler, which runs in the same task."""

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Looks at the metadata; the handler is passed on as it is."""
        found = {key: str(value) for key, value in handler_call_details.invocation_metadata or () if key in KEYS}
        incoming.set(found or None)
        return await continuation(handler_call_details)


def present() -> tuple[tuple[str, str], ...]:
    """For an outgoing call, the trace context of the program's own OpenTelemetry; empty when it does not use any."""
    trace: Any = sys.modules.get("opentelemetry.trace")
    if trace is None or not (span := trace.get_current_span().get_span_context()).is_valid:
        return ()
    told = {"traceparent": f"00-{span.trace_id:032x}-{span.span_id:016x}-{span.trace_flags:02x}"}
    if span.trace_state:
        told["tracestate"] = span.trace_state.to_header()
    return metadata(told)


def metadata(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The same context for an outgoing call."""
    return tuple(headers.items())
