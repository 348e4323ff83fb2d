"""A client's request as the edge sees it: one span, whatever number of engine requests it becomes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import ContextVar

from twostroke.errors import TwostrokeError
from twostroke.router.output import Trail
from twostroke.telemetry import spans
from twostroke.telemetry.spans import Attribute
from twostroke.telemetry.tracing import NO_HEADERS, Headers, Tracer, Value, trace_id_of

PROVIDER = "twostroke"

# What the routes of the HTTP edge do, in the words of OpenTelemetry's GenAI conventions.
OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/inference/v1/generate": "text_completion",
}


class Edge:
    """Made where a request comes in, current in the tasks that serve it, ended when its answer is over.

    tracer: None when tracing is off; a caller's trace context then goes through to the workers as it came.
    """

    current: ContextVar[Edge | None] = ContextVar("edge", default=None)

    def __init__(
        self,
        tracer: Tracer | None,
        operation: str,
        model: str,
        incoming: Headers | None,
        tenant: str = "",
        slo: str = "",
    ) -> None:
        self.operation = operation
        self.model = model
        self.tenant = tenant
        """Whose share of the cluster it uses; see Access.tenant."""
        self.slo = slo
        """The class that its header names; empty for the default one."""
        self.trails: list[Trail] = []
        """Of its engine requests, one per choice."""
        self.request_id = ""
        """The public one."""
        self.refusal: TwostrokeError | None = None
        """Why an engine request was not taken."""
        came = incoming or NO_HEADERS
        self._span = tracer.begin(spans.REQUEST, time.monotonic(), came) if tracer else None
        sampled = self._span.headers if self._span else NO_HEADERS
        self.headers = sampled if tracer else came
        """The trace context for everything that is done for the request; empty when it is not sampled."""
        self.trace_id = trace_id_of(self.headers) or trace_id_of(came)

    def end(self, error_type: str = "", message: str = "") -> None:
        """The answer is over, maybe because of an error that no engine request met."""
        if self._span is None:
            return
        attributes: dict[Attribute, Value] = {
            spans.OPERATION: self.operation,
            spans.PROVIDER: PROVIDER,
            spans.REQUEST_MODEL: self.model,
        }
        if self.request_id:
            attributes[spans.RESPONSE_ID] = self.request_id
        if self.trails:
            attributes.update(_usage(self.trails))
        failed = next((trail for trail in self.trails if trail.failure), None)
        if failed is not None:
            error_type, message = failed.error_type, failed.failure
        elif self.refusal is not None:
            error_type, message = self.refusal.reason, self.refusal.message
        if error_type:
            attributes[spans.ERROR_TYPE] = error_type
        self._span.end(f"{self.operation} {self.model}", time.monotonic(), attributes, error=message or error_type)


def _usage(trails: list[Trail]) -> Mapping[Attribute, Value]:
    first_token_s = min((trail.first_token_s for trail in trails if trail.first_token_s is not None), default=None)
    attributes: dict[Attribute, Value] = {
        spans.INPUT_TOKENS: trails[0].prompt_tokens,
        spans.OUTPUT_TOKENS: sum(trail.completion_tokens for trail in trails),
        spans.CACHED_TOKENS: trails[0].cached_tokens,
        spans.FINISH_REASONS: tuple(trail.ended_by for trail in trails),
        spans.ATTEMPTS: max(trail.attempts for trail in trails),
    }
    if first_token_s is not None:
        attributes[spans.TTFT] = first_token_s - trails[0].received_s
    return attributes
