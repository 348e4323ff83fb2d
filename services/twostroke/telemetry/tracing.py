"""Traces: the seam to whatever writes them, and the choice of it. Imports OpenTelemetry only when tracing is on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.telemetry.spans import Attribute, SpanType

log = logging.getLogger(__name__)

Headers = Mapping[str, str]
"""W3C trace context: traceparent, tracestate."""
Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[Attribute, Value]

NO_HEADERS: Headers = {}


@dataclass(frozen=True, slots=True)
class SpanRef:
    """What a link points at."""

    trace_id: int
    span_id: int


class OpenSpan(Protocol):
    """A span that has begun."""

    @property
    def headers(self) -> Headers:
        """What makes other spans its children, here and in other processes."""
        ...

    def end(self, name: str, end_s: float, attributes: Attributes, *, error: str = "") -> None:
        """Writes it. name: the span's; end_s: monotonic; error: a message that marks it as failed."""
        ...


class Tracer(Protocol):
    """Writes spans from monotonic moments, in the background. What is not sampled costs a look at a flag."""

    def begin(self, span: SpanType, begin_s: float, parent: Headers) -> OpenSpan | None:
        """Begins a span that others will have as parent; None when its trace is not sampled."""
        ...

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
        """Writes a span that is over; None when its parent is not sampled, or there is none."""
        ...

    def close(self) -> None:
        """Sends what is left, for at most some seconds; blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Clock:
    """Puts monotonic moments on the wall, so that a jump of the wall's clock moves spans and stretches none."""

    wall_ns: Callable[[], int] = time.time_ns
    monotonic_ns: Callable[[], int] = time.monotonic_ns

    def offset_ns(self) -> int:
        """What to add to monotonic nanoseconds now."""
        return self.wall_ns() - self.monotonic_ns()


def open_tracer(url: str, ratio: float, service: str, instance: str, clock: Clock | None = None) -> Tracer | None:
    """The tracer of a process; None when the URL is empty. Call it after the last fork.

    url: of an OTLP/gRPC receiver, with https:// for TLS. ratio: share of the traces that begin here to sample.
    service, instance: name of the program and of this process.
    """
    if not url:
        return None
    from twostroke.telemetry.otlp import OtlpTracer

    log.info("traces of %s go to %s, %g of all", instance, url, ratio)
    return OtlpTracer(url, ratio, service, instance, clock or Clock())


def trace_id_of(headers: Headers) -> str:
    """The trace id of a traceparent, for logs; empty when there is none."""
    parts = headers.get("traceparent", "").split("-")
    return parts[1] if len(parts) >= 4 else ""
