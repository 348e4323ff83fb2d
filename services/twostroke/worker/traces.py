"""A worker's spans of the requests that it runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.engine.base import EngineLoad, EngineOutput, Stroke
from twostroke.errors import TwostrokeError
from twostroke.telemetry import spans
from twostroke.telemetry.spans import Attribute
from twostroke.telemetry.tracing import Attributes, Headers, Tracer, Value
from twostroke.v1.engine_pb2 import EngineRequest, PromptStats


@dataclass(slots=True)
class _Traced:
    """A request whose trace is sampled. Moments are monotonic seconds."""

    parent: Headers
    stroke: Stroke
    begun_s: float
    """When the span that is open began: the first at admission, the second when the prompt was there."""
    prompt_ready: bool = False
    steps: int = 0
    """The engine's steps until then."""


class WorkerTraces:
    """An Observer of the host. Writes each span when it is over; a step costs it a look at every row."""

    def __init__(self, tracer: Tracer, worker_id: str) -> None:
        self._tracer = tracer
        self._worker_id = worker_id
        self._traced: dict[str, _Traced] = {}

    def admitted(self, request: EngineRequest, stroke: Stroke) -> None:
        """See Observer."""
        if request.trace_context:
            self._traced[request.request_id] = _Traced(dict(request.trace_context), stroke, time.monotonic())

    def stepped(self, outputs: Sequence[EngineOutput], load: EngineLoad) -> None:
        """See Observer."""
        if not self._traced:
            return
        for output in outputs:
            if output.done or output.prompt is not None:
                self._take(output, load)

    def cancelled(self, request_ids: Sequence[str]) -> None:
        """See Observer."""
        for request_id in request_ids:
            self._end(request_id, None, None)

    def lost(self, error: TwostrokeError) -> None:
        """See Observer."""
        for request_id in list(self._traced):
            self._end(request_id, error, None)

    def _take(self, output: EngineOutput, load: EngineLoad) -> None:
        traced = self._traced.get(output.request_id)
        if traced is None:
            return
        if output.prompt is not None and not traced.prompt_ready and output.failure is None:
            self._prompt_ready(output.request_id, traced, output.prompt)
            traced.prompt_ready, traced.begun_s, traced.steps = True, time.monotonic(), load.steps
        if output.done:
            self._end(output.request_id, output.failure, load)

    def _prompt_ready(self, request_id: str, traced: _Traced, stats: PromptStats) -> None:
        now_s = time.monotonic()
        named: Attributes = {spans.WORKER: self._worker_id, spans.HANDOFF_ID: request_id}
        computed: Attributes = {**named, spans.COMPUTED_TOKENS: stats.computed_tokens}
        if traced.stroke is Stroke.DECODE:
            self._tracer.record(spans.DECODE_WAIT, traced.begun_s, now_s, traced.parent, computed)
            return
        # The engine's own durations, put before this moment.
        run_s = max(traced.begun_s, now_s - stats.run_ms / 1000)
        self._tracer.record(spans.PREFILL_QUEUE, traced.begun_s, run_s, traced.parent, named)
        counted: Attributes = {
            **computed,
            spans.INPUT_TOKENS: stats.prompt_tokens,
            spans.PROMPT_CACHED_TOKENS: stats.cached_tokens,
        }
        self._tracer.record(spans.PREFILL_RUN, run_s, now_s, traced.parent, counted)

    def _end(self, request_id: str, error: TwostrokeError | None, load: EngineLoad | None) -> None:
        traced = self._traced.pop(request_id, None)
        if traced is None or (traced.prompt_ready and traced.stroke is Stroke.PREFILL):
            return
        attributes: dict[Attribute, Value] = {spans.WORKER: self._worker_id, spans.HANDOFF_ID: request_id}
        if traced.prompt_ready:
            span = spans.DECODE_RUN
            if load is not None:
                attributes[spans.STEPS] = load.steps - traced.steps
        else:
            span = spans.DECODE_WAIT if traced.stroke is Stroke.DECODE else spans.PREFILL_RUN
        if error is not None:
            attributes[spans.ERROR_TYPE] = error.reason
        message = error.message if error else ""
        self._tracer.record(span, traced.begun_s, time.monotonic(), traced.parent, attributes, error=message)
