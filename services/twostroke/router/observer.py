"""What becomes known of every request when it is over: its spans, its numbers, its line in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twostroke.errors import TwostrokeError
from twostroke.policy.explain import summary
from twostroke.router import traces
from twostroke.router.edge import Edge
from twostroke.router.output import Trail
from twostroke.telemetry.logs import fields
from twostroke.telemetry.tracing import Tracer

if TYPE_CHECKING:  # its library is imported only where metrics are on
    from twostroke.router.metrics import RequestMetrics

log = logging.getLogger("twostroke.requests")


class RequestObserver:
    """tracer, metrics: None for what is off. log_prompts: whether the line has the prompt's token ids."""

    def __init__(self, tracer: Tracer | None, metrics: RequestMetrics | None, *, log_prompts: bool) -> None:
        self.tracer = tracer
        self._metrics = metrics
        self._log_prompts = log_prompts

    def refused(self, error: TwostrokeError, edge: Edge | None) -> None:
        """A request was not taken at all."""
        if edge is not None:
            edge.refusal = error
        if self._metrics is not None:
            self._metrics.refused(error.reason)

    def over(
        self, request_id: str, prompt: Sequence[int], trail: Trail, edge: Edge | None, *, recomputed: bool
    ) -> None:
        """An engine request is over."""
        if self.tracer is not None and edge is not None and edge.headers:
            traces.write(self.tracer, edge.headers, request_id, trail)
        if self._metrics is not None:
            operation, model = (edge.operation, edge.model) if edge else ("text_completion", "")
            self._metrics.over(trail, operation, model, recomputed=recomputed)
        if log.isEnabledFor(logging.INFO):
            values = _values(request_id, trail, edge)
            if self._log_prompts:
                values["prompt_token_ids"] = list(prompt)
            log.info("request is over", extra=fields(values))


def _values(request_id: str, trail: Trail, edge: Edge | None) -> dict[str, Any]:
    def ms(until_s: float | None, since_s: float | None = trail.received_s) -> float | None:
        return None if until_s is None or since_s is None else round((until_s - since_s) * 1000, 3)

    chosen = trail.plan.chosen if trail.plan else None
    values = {
        "request_id": request_id,
        "public_id": edge.request_id if edge and edge.request_id != request_id else None,
        "trace_id": edge.trace_id if edge else None,
        "operation": edge.operation if edge else None,
        "finish": trail.ended_by,
        "error": trail.failure,
        "error_type": trail.error_type,
        "prefill_worker": trail.prefill_worker_id,
        "decode_worker": trail.decode_worker_id,
        "option": trail.option,
        "why": summary(trail.plan) if trail.plan else None,
        "predicted_ttft_ms": round(chosen.ttft_s * 1000, 3) if chosen else None,
        "predicted_itl_ms": round(chosen.itl_s * 1000, 3) if chosen else None,
        "slo": edge.slo if edge else None,
        "attempts": trail.attempts,
        "prompt_tokens": trail.prompt_tokens,
        "cached_tokens": trail.cached_tokens,
        "completion_tokens": trail.completion_tokens,
        "ttft_ms": ms(trail.first_token_s),
        "queue_ms": round(trail.prefill_queue_ms, 3),
        "prefill_ms": round(trail.prefill_run_ms, 3),
        "handoff_ms": ms(trail.handoff_ready_s, trail.handoff_begun_s),
        "handoff_exposed_ms": None if trail.exposed_s is None else round(trail.exposed_s * 1000, 3),
        "handoff_bytes": trail.transferred_bytes,
        "duration_ms": ms(trail.finished_s),
    }
    return {key: value for key, value in values.items() if value not in (None, "")}
