"""Spans over OTLP/gRPC, by OpenTelemetry's own exporter and batches.

Spans are made whole when they are over, since their moments are known by then; the SDK's way of opening a span and
setting its attributes one after another costs several times as much.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from importlib import metadata

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    get_current_span,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from twostroke.telemetry.spans import SpanType
from twostroke.telemetry.tracing import Attributes, Clock, Headers, SpanRef

EXPORT_TIMEOUT_S = 3.0

_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_OK = Status()
_NO_STATE = TraceState()
_RATIO_BITS = TraceIdRatioBased.TRACE_ID_LIMIT


class _Resource(Resource):
    """Hashed once: the encoder does it for every span, by way of JSON."""

    def __init__(self, resource: Resource) -> None:
        super().__init__(resource.attributes, resource.schema_url)
        self._hash = super().__hash__()

    def __hash__(self) -> int:
        return self._hash


class OtlpTracer:
    """See Tracer. url: of the receiver; https:// for TLS."""

    def __init__(self, url: str, ratio: float, service: str, instance: str, clock: Clock) -> None:
        self._clock = clock
        self._ids = RandomIdGenerator()
        self._bound = TraceIdRatioBased.get_bound_for_rate(ratio)
        version = metadata.version("twostroke")
        self._scope = InstrumentationScope("twostroke", version)
        # Viewers that correct clocks do so per host.
        described: dict[str, str | int] = {
            "service.name": service,
            "service.namespace": "twostroke",
            "service.instance.id": instance,
            "service.version": version,
            "host.name": socket.gethostname(),
            "process.pid": os.getpid(),
        }
        self._resource = _Resource(Resource.create({**described}))
        exporter = OTLPSpanExporter(endpoint=url, insecure=not url.startswith("https"), timeout=EXPORT_TIMEOUT_S)
        self._processor = BatchSpanProcessor(exporter)

    def begin(self, span: SpanType, begin_s: float, parent: Headers) -> OtlpSpan | None:
        """See Tracer.begin."""
        above = _context(parent)
        trace_id = above.trace_id if above else self._ids.generate_trace_id()
        # As the SDK's ParentBasedTraceIdRatio decides, which takes as long as making a span.
        if not (above.trace_flags.sampled if above else trace_id & _RATIO_BITS < self._bound):
            return None
        state = above.trace_state if above else _NO_STATE
        context = SpanContext(trace_id, self._ids.generate_span_id(), False, _SAMPLED, state)
        return OtlpSpan(self, context, above, begin_s, self._clock.offset_ns(), _OwnHeaders(context))

    def record(
        self,
        span: SpanType,
        begin_s: float,
        end_s: float,
        parent: Headers,
        attributes: Attributes,
        *,
        link: SpanRef | None = None,
        error: str = "",
    ) -> SpanRef | None:
        """See Tracer.record."""
        above = _context(parent)
        if above is None or not above.trace_flags.sampled:
            return None
        own = SpanContext(above.trace_id, self._ids.generate_span_id(), False, _SAMPLED, above.trace_state)
        links = (Link(SpanContext(link.trace_id, link.span_id, False, _SAMPLED)),) if link else ()
        begin_ns, end_ns = self._on_the_wall(begin_s, end_s, self._clock.offset_ns())
        self.write(span.name, own, above, SpanKind.INTERNAL, begin_ns, end_ns, attributes, links, error)
        return SpanRef(own.trace_id, own.span_id)

    @staticmethod
    def _on_the_wall(begin_s: float, end_s: float, offset_ns: int) -> tuple[int, int]:
        return int(begin_s * 1e9) + offset_ns, int(end_s * 1e9) + offset_ns

    def write(
        self,
        name: str,
        own: SpanContext,
        above: SpanContext | None,
        kind: SpanKind,
        begin_ns: int,
        end_ns: int,
        attributes: Attributes,
        links: tuple[Link, ...],
        error: str,
    ) -> None:
        """Hands a whole span to the batch."""
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=own,
                parent=above,
                resource=self._resource,
                attributes={attribute.key: value for attribute, value in attributes.items()},
                links=links,
                kind=kind,
                status=Status(StatusCode.ERROR, error) if error else _OK,
                start_time=begin_ns,
                end_time=max(begin_ns, end_ns),
                instrumentation_scope=self._scope,
            )
        )

    def close(self) -> None:
        """See Tracer.close."""
        self._processor.shutdown()  # type: ignore[no-untyped-call]


@dataclass(slots=True)
class OtlpSpan:
    """See OpenSpan."""

    tracer: OtlpTracer
    context: SpanContext
    above: SpanContext | None
    begin_s: float
    offset_ns: int
    headers: Headers

    def end(self, name: str, end_s: float, attributes: Attributes, *, error: str = "") -> None:
        """See OpenSpan.end."""
        begin_ns = int(self.begin_s * 1e9) + self.offset_ns
        end_ns = begin_ns + int((end_s - self.begin_s) * 1e9)
        self.tracer.write(name, self.context, self.above, SpanKind.SERVER, begin_ns, end_ns, attributes, (), error)


class _OwnHeaders(dict[str, str]):
    """Headers of a span that was begun here; to read them again would cost as much as a span."""

    def __init__(self, context: SpanContext) -> None:
        super().__init__(traceparent=f"00-{context.trace_id:032x}-{context.span_id:016x}-01")
        if context.trace_state:
            self["tracestate"] = context.trace_state.to_header()
        self.context = context


def _context(headers: Headers) -> SpanContext | None:
    """The span that W3C headers name; None for none, and for headers that are malformed."""
    if isinstance(headers, _OwnHeaders):
        return headers.context
    if "traceparent" not in headers:
        return None
    found = get_current_span(_PROPAGATOR.extract(headers)).get_span_context()
    return found if found.is_valid else None
