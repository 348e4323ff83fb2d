"""What an answer over HTTP holds, streamed and whole, where a prefill worker wrote its first token."""

from typing import Any

import pytest

from edge.http_cluster import MODEL, PROMPT, Edge, body, oracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200), pytest.mark.asyncio(loop_scope="package")]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "temperature": 0}


async def test_the_first_token_is_in_the_answer_once_and_at_its_place(edge: Edge) -> None:
    """O-09."""
    whole = (await edge.ask(**body(max_tokens=3))).json()
    streamed = await edge.stream(**body(max_tokens=3))
    assert whole["choices"][0]["token_ids"] == streamed.token_ids == oracle(3)
    assert whole["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("count", [1, 3, 40])
async def test_nothing_is_lost_or_repeated_where_the_strokes_meet(edge: Edge, count: int) -> None:
    """O-10: however many tokens come after the first."""
    answers = [
        (await edge.ask(**body(max_tokens=count))).json()["choices"][0]["token_ids"],
        (await edge.stream(**body(max_tokens=count))).token_ids,
    ]
    assert answers == [oracle(count)] * 2


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("streams", [False, True])
async def test_max_tokens_is_never_exceeded(edge: Edge, count: int, streams: bool) -> None:
    """O-11."""
    if streams:
        answer = await edge.stream(**body(max_tokens=count, stream_options={"include_usage": True}))
        usage, finish = answer.events[-1]["usage"], answer.events[-2]["choices"][0]["finish_reason"]
    else:
        found = (await edge.ask(**body(max_tokens=count))).json()
        usage, finish = found["usage"], found["choices"][0]["finish_reason"]
    assert (usage["completion_tokens"], finish) == (count, "length")


async def test_min_tokens_above_one_reaches_decode(edge: Edge) -> None:
    """O-51: end of text and stop tokens wait for a hundred tokens, on both endpoints."""
    everything = oracle(100)
    for path, asked in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", CHAT)):
        more = {"max_tokens": 500, "min_tokens": 100, "stop_token_ids": sorted(set(everything))}
        answer = await edge.ask(path, **{"model": MODEL, "temperature": 0, "ignore_eos": True, **asked, **more})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] >= 100


@pytest.mark.parametrize(
    ("limits", "count"),
    [
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 6}, 6),
        ({"max_tokens": 5, "max_completion_tokens": 7}, 7),
        ({"max_tokens": None}, None),
        ({}, None),
    ],
    ids=["max_tokens", "max_completion_tokens", "both", "null", "absent"],
)
async def test_a_limit_that_is_absent_stays_absent(edge: Edge, limits: dict[str, Any], count: int | None) -> None:
    """O-52: an answer without a limit goes on until something else ends it, here a token that comes as the 25th."""
    asked = {**CHAT, "ignore_eos": True, "return_token_ids": True}
    tokens = (await edge.ask("/v1/chat/completions", **asked, max_tokens=25)).json()["choices"][0]["token_ids"]
    answer = await edge.ask("/v1/chat/completions", **asked, **limits, stop_token_ids=[tokens[-1]])
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == (count or tokens.index(tokens[-1]) + 1)


@pytest.mark.parametrize("streams", [False, True])
async def test_cached_tokens_are_the_hits_of_prefill(edge: Edge, streams: bool) -> None:
    """O-53: none for a cold prompt, though decode had all of it handed over; its full blocks the second time."""
    prompt = [(i * 13) % 30000 + 100 + streams for i in range(200)]

    async def cached() -> int:
        asked = body(prompt=prompt, stream_options={"include_usage": True} if streams else None)
        usage = (await edge.stream(**asked)).events[-1] if streams else (await edge.ask(**asked)).json()
        return int((usage["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)

    assert [await cached(), await cached()] == [0, 192]


@pytest.mark.parametrize("count", [0, 5, 20])
async def test_every_token_has_its_log_probabilities_the_first_included(edge: Edge, count: int) -> None:
    """O-55."""
    asked = {**CHAT, "max_tokens": 4, "ignore_eos": True, "logprobs": True, "top_logprobs": count}
    content = (await edge.ask("/v1/chat/completions", **asked)).json()["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [count] * 4
    assert all(entry["logprob"] == pytest.approx(-0.6931, abs=1e-3) for entry in content)


@pytest.mark.parametrize(("asked", "times"), [(True, 1), (False, 0), (None, 0)], ids=str)
async def test_usage_is_sent_once_and_only_when_asked(edge: Edge, asked: bool | None, times: int) -> None:
    """O-56: in a chunk of its own, without choices, last."""
    more = {} if asked is None else {"stream_options": {"include_usage": asked}}
    answer = await edge.stream(**body(**more))
    with_usage = [event for event in answer.events if event.get("usage")]
    assert len(with_usage) == times
    assert answer.ended
    if times:
        assert answer.events[-1] == with_usage[0]
        assert with_usage[0]["choices"] == []


async def test_a_stream_and_a_whole_answer_say_the_same(edge: Edge) -> None:
    """O-47: and the stream comes in pieces."""
    whole = (await edge.ask(**body(max_tokens=30))).json()["choices"][0]
    streamed = await edge.stream(**body(max_tokens=30))
    pieces = [choice["text"] for event in streamed.events for choice in event["choices"]]
    assert "".join(pieces) == whole["text"]
    assert len(pieces) > 5
