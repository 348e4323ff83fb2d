from __future__ import annotations

from twostroke.launch.timeline import Span, render, spans
from twostroke.v1.inference_pb2 import Timeline, Usage

TWO_POOLS = Timeline(
    prefill_worker_id="prefill-0",
    decode_worker_id="decode-1",
    placed_ms=1.0,
    prefill_started_ms=20.0,
    prefill_finished_ms=60.0,
    first_token_ms=61.0,
    decode_started_ms=70.0,
    finished_ms=100.0,
    decode_computed_tokens=1,
    transferred_tokens=32,
    transferred_bytes=3 << 20,
    attempts=1,
)
USAGE = Usage(prompt_tokens=33, completion_tokens=14, cached_tokens=16)


def test_phases_follow_each_other() -> None:
    assert spans(TWO_POOLS) == [
        Span("queue", 0.0, 20.0),
        Span("prefill", 20.0, 60.0, "prefill-0"),
        Span("hand-off", 60.0, 70.0),
        Span("decode", 70.0, 100.0, "decode-1"),
    ]


def test_bars_are_to_scale() -> None:
    lines = render(TWO_POOLS, USAGE, width=10)
    assert lines == [
        "  queue    ██              20.0 ms",
        "  prefill    ████          40.0 ms  prefill-0",
        "  hand-off       █         10.0 ms",
        "  decode          ███      30.0 ms  decode-1",
        "  first token after 61.0 ms; 14 tokens, then 333.3 tokens/s; 100.0 ms in all",
        "  prompt 33 tokens, 16 of them cached; 3.0 MiB of KV moved for 32 tokens",
    ]


def test_a_prompt_that_decode_computed_again_is_told() -> None:
    """O-45. Its last token is computed with the first one of the answer, always."""
    again = Timeline()
    again.CopyFrom(TWO_POOLS)
    again.decode_computed_tokens = 20
    assert render(again, USAGE, width=10)[-1].endswith("; 20 prompt tokens recomputed on decode")


def test_an_answer_of_one_token_has_no_second_stroke() -> None:
    timeline = Timeline(
        prefill_worker_id="p", prefill_started_ms=1.0, prefill_finished_ms=9.0, first_token_ms=9.0, finished_ms=10.0
    )
    lines = render(timeline, Usage(prompt_tokens=4, completion_tokens=1), width=10)
    assert [line.split()[0] for line in lines[:2]] == ["queue", "prefill"]
    assert lines[2:] == ["  first token after 9.0 ms; 1 token; 10.0 ms in all", "  prompt 4 tokens"]


def test_a_phase_too_short_to_see_gets_a_mark_inside_the_width() -> None:
    timeline = Timeline(
        prefill_worker_id="p",
        decode_worker_id="d",
        prefill_started_ms=1.0,
        prefill_finished_ms=99.99,
        first_token_ms=99.99,
        decode_started_ms=99.995,
        finished_ms=100.0,
        attempts=2,
    )
    lines = render(timeline, Usage(prompt_tokens=4, completion_tokens=2), width=10)
    bars = [line[11:21] for line in lines[:4]]
    assert bars == ["█         ", "██████████", "         █", "         █"]
    assert lines[-1] == "  placed 2 times"


def test_kv_that_moves_while_prefill_runs_has_no_negative_hand_off() -> None:
    timeline = Timeline(prefill_started_ms=1.0, prefill_finished_ms=50.0, decode_started_ms=40.0, finished_ms=60.0)
    assert spans(timeline)[2] == Span("hand-off", 40.0, 40.0)


def test_an_empty_timeline_renders() -> None:
    assert render(Timeline(), Usage())[0].split() == ["queue", "█", "0.0", "ms"]
