"""The router's spans of one engine request, made when it is over from the moments that its trail kept."""

from __future__ import annotations

from twostroke.policy.explain import summary
from twostroke.router.output import FailedAttempt, Trail
from twostroke.telemetry import spans
from twostroke.telemetry.spans import Attribute
from twostroke.telemetry.tracing import Headers, SpanRef, Tracer, Value

Attributes = dict[Attribute, Value]


def write(tracer: Tracer, parent: Headers, request_id: str, trail: Trail) -> None:
    """Writes them: siblings under the edge's span, attempts linked one to the next."""
    begun_s, link = trail.received_s, None
    for number, failed in enumerate(trail.failed_attempts, 1):
        link = _failed(tracer, parent, _named(request_id, number), begun_s, failed, link)
        begun_s = failed.failed_s
    if trail.attempts > len(trail.failed_attempts) and trail.finished_s is not None:
        _last(tracer, parent, _named(request_id, trail.attempts), begun_s, trail, link)


def _named(request_id: str, number: int) -> Attributes:
    return {spans.REQUEST_ID: request_id, spans.ATTEMPT: number}


def _failed(
    tracer: Tracer, parent: Headers, named: Attributes, begun_s: float, failed: FailedAttempt, link: SpanRef | None
) -> SpanRef | None:
    placed_s = failed.placed_s if failed.placed_s is not None and failed.placed_s >= begun_s else None
    if placed_s is None:
        tracer.record(spans.PLACE, begun_s, failed.failed_s, parent, named, link=link, error=failed.reason)
        return link
    workers: Attributes = {
        spans.PREFILL_WORKER: failed.prefill_worker_id,
        spans.DECODE_WORKER: failed.decode_worker_id,
    }
    placement = named | workers | {spans.OPTION: failed.option}
    tracer.record(spans.PLACE, begun_s, placed_s, parent, placement, link=link)
    error: Attributes = {spans.ERROR_TYPE: failed.error_type}
    if failed.handoff_begun_s is not None and failed.handoff_begun_s >= placed_s:
        attributes = named | workers | error
        tracer.record(spans.HANDOFF, failed.handoff_begun_s, failed.failed_s, parent, attributes, error=failed.reason)
    attributes = named | workers | error
    return tracer.record(
        spans.ATTEMPT_SPAN, placed_s, failed.failed_s, parent, attributes, link=link, error=failed.reason
    )


def _last(
    tracer: Tracer, parent: Headers, named: Attributes, begun_s: float, trail: Trail, link: SpanRef | None
) -> None:
    assert trail.finished_s is not None
    if trail.placed_s is None or trail.placed_s < begun_s:
        tracer.record(spans.PLACE, begun_s, trail.finished_s, parent, named, link=link, error=trail.failure)
        return
    workers: Attributes = {
        spans.PREFILL_WORKER: trail.prefill_worker_id,
        spans.DECODE_WORKER: trail.admitted_on,
    }
    placement = named | workers | {spans.OPTION: trail.option} | _predicted(trail)
    tracer.record(spans.PLACE, begun_s, trail.placed_s, parent, placement, link=link)
    if trail.handoff_begun_s is not None and trail.handoff_begun_s >= trail.placed_s:
        _handoff(tracer, parent, named | workers, trail)


def _predicted(trail: Trail) -> Attributes:
    if trail.plan is None or trail.plan.chosen is None:
        return {}
    chosen = trail.plan.chosen
    return {
        spans.WHY: summary(trail.plan),
        spans.PREDICTED_TTFT_MS: chosen.ttft_s * 1000,
        spans.PREDICTED_ITL_MS: chosen.itl_s * 1000,
        spans.PREDICTED_CACHED: chosen.cached_tokens,
    }


def _handoff(tracer: Tracer, parent: Headers, attributes: Attributes, trail: Trail) -> None:
    assert trail.handoff_begun_s is not None
    assert trail.finished_s is not None
    ready_s = trail.handoff_ready_s
    if ready_s is None and trail.answered:
        # The first token was the last; what had begun was called off.
        return
    attributes |= {spans.HANDOFF_BYTES: trail.handoff_bytes, spans.HANDOFF_BLOCKS: trail.handoff_blocks}
    attributes |= {spans.HANDOFF_LANES: trail.handoff_lanes, spans.LINK_GB_PER_S: trail.link_bytes_per_s / 1e9}
    if ready_s is None:
        tracer.record(spans.HANDOFF, trail.handoff_begun_s, trail.finished_s, parent, attributes, error=trail.failure)
        return
    attributes[spans.HANDOFF_TOKENS] = trail.transferred_tokens
    attributes[spans.HANDOFF_GB_PER_S] = trail.transferred_bytes / max(1e-9, ready_s - trail.handoff_begun_s) / 1e9
    if trail.handoff_chunks:
        attributes[spans.HANDOFF_CHUNKS] = trail.handoff_chunks
    if trail.exposed_s is not None:
        attributes[spans.EXPOSED_MS] = trail.exposed_s * 1000
    tracer.record(spans.HANDOFF, trail.handoff_begun_s, ready_s, parent, attributes)
