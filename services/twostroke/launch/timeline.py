"""One request's timeline as text."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.v1.inference_pb2 import Timeline, Usage

_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Span:
    """A phase of the request, in milliseconds since the router got it."""

    name: str
    start_ms: float
    end_ms: float
    worker: str = ""


def spans(timeline: Timeline) -> list[Span]:
    """The phases that the request went through, in order. Phases overlap where KV moves while prefill still runs."""
    found = [Span("queue", 0.0, timeline.prefill_started_ms or timeline.first_token_ms)]
    if timeline.prefill_finished_ms:
        prefill_end_ms = timeline.prefill_finished_ms
        found.append(Span("prefill", timeline.prefill_started_ms, prefill_end_ms, timeline.prefill_worker_id))
        if timeline.decode_started_ms:
            start_ms = min(prefill_end_ms, timeline.decode_started_ms)
            found.append(Span("hand-off", start_ms, timeline.decode_started_ms))
    if timeline.decode_started_ms:
        found.append(Span("decode", timeline.decode_started_ms, timeline.finished_ms, timeline.decode_worker_id))
    return found


def render(timeline: Timeline, usage: Usage, width: int = _WIDTH) -> list[str]:
    """Lines with one bar per phase, `width` columns being the whole request, and the figures below."""
    total_ms = max(timeline.finished_ms, 1e-3)
    lines = []
    for span in spans(timeline):
        start = min(round(span.start_ms / total_ms * width), width - 1)
        # A phase too short to see still gets a mark.
        length = max(round((span.end_ms - span.start_ms) / total_ms * width), 1)
        bar = (" " * start + "█" * min(length, width - start)).ljust(width)
        lines.append(f"  {span.name:<9}{bar} {span.end_ms - span.start_ms:>9.1f} ms  {span.worker}".rstrip())
    lines.append(f"  first token after {timeline.first_token_ms:.1f} ms; {_speed(timeline, usage)}")
    lines.append(f"  {_prompt(timeline, usage)}")
    if timeline.attempts > 1:
        lines.append(f"  placed {timeline.attempts} times")
    return lines


def _speed(timeline: Timeline, usage: Usage) -> str:
    count = usage.completion_tokens
    text = f"{count} token{'' if count == 1 else 's'}"
    duration_ms = timeline.finished_ms - timeline.first_token_ms
    if count > 1 and duration_ms > 0:
        text += f", then {(count - 1) / duration_ms * 1000:.1f} tokens/s"
    return f"{text}; {timeline.finished_ms:.1f} ms in all"


def _prompt(timeline: Timeline, usage: Usage) -> str:
    text = f"prompt {usage.prompt_tokens} tokens"
    if usage.cached_tokens:
        text += f", {usage.cached_tokens} of them cached"
    if not timeline.decode_worker_id:
        return text
    moved = f"{_size(timeline.transferred_bytes)} of KV moved for {timeline.transferred_tokens} tokens"
    # The step in which decode takes the first token again computes the prompt's last one.
    if timeline.decode_computed_tokens <= 1:
        return f"{text}; {moved}"
    return f"{text}; {moved}; {timeline.decode_computed_tokens} prompt tokens recomputed on decode"


def _size(count: int) -> str:
    value = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "bytes" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
