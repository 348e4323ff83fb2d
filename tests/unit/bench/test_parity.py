"""The comparison itself: that it sees a difference, in every place where one may be."""

import copy
import json
from typing import Any

import pytest

from twostroke.bench.parity.ask import events, whole
from twostroke.bench.parity.compare import LOGPROB_TOLERANCE, differences, largest_gap
from twostroke.bench.parity.row import Row, chat, completion, streamed
from twostroke.bench.parity.run import Outcome
from twostroke.bench.parity.table_forms import byte_letters
from twostroke.bench.parity.ttft import Timed

ANSWER: dict[str, Any] = {
    "http_status": 200,
    "id": "cmpl-1",
    "choices": [
        {"index": 0, "text": " Paris", "token_ids": [7042], "finish_reason": "stop", "stop_reason": None,
         "logprobs": {"tokens": [" Paris"], "token_logprobs": [-0.25],
                      "top_logprobs": [{" Paris": -0.25, " a": -2.0}]}}
    ],
    "usage": {"completion_tokens": 1, "prompt_tokens_details": None},
}  # fmt: skip


def changed(path: str, value: Any) -> dict[str, Any]:
    answer = copy.deepcopy(ANSWER)
    *parents, last = path.split(".")
    target: Any = answer
    for name in parents:
        target = target[int(name) if isinstance(target, list) else name]
    target[last] = value
    return answer


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("choices.0.text", " Rome"),
        ("choices.0.token_ids", [7042, 30]),
        ("choices.0.finish_reason", "length"),
        ("choices.0.stop_reason", 7),
        ("choices.0.logprobs.token_logprobs", [-0.26]),
        ("choices.0.logprobs.top_logprobs", [{" Paris": -0.25, " the": -2.0}]),
        ("usage.completion_tokens", 2),
        ("usage.prompt_tokens_details", {"cached_tokens": 1}),
        ("usage.more", 1),
    ],
)
def test_a_difference_is_seen_and_its_place_named(path: str, value: Any) -> None:
    found = list(differences(ANSWER, changed(path, value)))
    assert found
    assert all(str(difference).startswith(path) for difference in found)


def test_names_of_the_call_and_the_last_digits_do_not_count() -> None:
    near = changed("choices.0.logprobs.token_logprobs", [-0.25 - LOGPROB_TOLERANCE / 2])
    assert list(differences(ANSWER, near | {"id": "cmpl-2"})) == []
    assert largest_gap(ANSWER, near) == pytest.approx(LOGPROB_TOLERANCE / 2)


@pytest.mark.parametrize(
    ("row", "two", "result"),
    [
        (completion("a", "x"), ANSWER, "equal"),
        (completion("a", "x"), changed("choices.0.text", ""), "DIFFERENT"),
        (completion("a", "x", lambda answer: answer["choices"][0]["nothing"]), ANSWER, "DIFFERENT"),
        (Row("a", "/", {}, refused="xargs"), {"http_status": 400, "error": {"message": "no xargs"}}, "refused"),
        (Row("a", "/", {}, refused="xargs"), {"http_status": 500, "error": {"message": "no xargs"}}, "DIFFERENT"),
        (Row("a", "/", {}, refused="xargs"), ANSWER, "DIFFERENT"),
    ],
)
def test_a_row_is_equal_refused_or_different(row: Row, two: dict[str, Any], result: str) -> None:
    assert Outcome(row, ANSWER, two).result == result


def test_two_equal_errors_are_not_equal_answers() -> None:
    error = {"http_status": 500, "error": {"message": "broken"}}
    assert "broken" in Outcome(completion("a", "x"), error, error).problems[0]


def sse(*chunks: dict[str, Any], end: bool = True) -> bytes:
    lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"] * end
    return ": a comment\n\n".join(lines).encode()


def test_a_stream_becomes_the_answer_that_it_is_without_one() -> None:
    def part(text: str, tokens: list[int], finish: str | None) -> dict[str, Any]:
        logprobs = {"tokens": [text], "token_logprobs": [-1.0]}
        return {
            "choices": [{"index": 0, "text": text, "token_ids": tokens, "logprobs": logprobs, "finish_reason": finish}]
        }

    found = whole(
        list(events(sse(part(" Pa", [1], None), part("ris", [2], "stop"), {"choices": [], "usage": {"n": 2}})))
    )
    assert found == {
        "choices": [
            {"index": 0, "text": " Paris", "token_ids": [1, 2], "finish_reason": "stop",
             "logprobs": {"tokens": [" Pa", "ris"], "token_logprobs": [-1.0, -1.0]}}
        ],
        "usage": {"n": 2},
        "usage_events": 1,
    }  # fmt: skip
    assert whole(list(events(sse(part("x", [1], None), end=False))))["broken"]


def test_streamed_tool_calls_are_put_together() -> None:
    def part(**call: Any) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}}]}

    first = part(id="c", type="function", function={"name": "f", "arguments": '{"a'})
    made = whole(list(events(sse(first, part(function={"arguments": '": 1}'})))))
    call = made["choices"][0]["message"]["tool_calls"][0]
    assert (call["type"], call["function"]) == ("function", {"name": "f", "arguments": '{"a": 1}'})


def test_a_streamed_row_asks_for_usage() -> None:
    row = streamed(chat("c", "Hi"))
    assert row.streams
    assert row.body["stream_options"] == {"include_usage": True}


def test_the_goal_of_the_first_token_is_a_factor_and_a_few_milliseconds() -> None:
    timed = Timed(512, one_ms=(90.0, 100.0, 400.0), two_ms=(108.0, 109.0, 111.0))
    assert timed.medians_ms == (100.0, 109.0)
    assert timed.allowed_ms == pytest.approx(110.0)


def test_bytes_have_the_letters_of_byte_level_vocabularies() -> None:
    letters = byte_letters()
    assert len(set(letters)) == 256
    assert (letters[32], letters[ord("a")], letters[10]) == ("Ġ", "a", "Ċ")
