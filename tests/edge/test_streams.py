"""Streams that are refused, that fall silent, that break, that nobody reads."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import psutil
import pytest

from edge.http_cluster import MODEL, PROMPT, Edge, body, http_edge, oracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200), pytest.mark.asyncio(loop_scope="package")]

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}]}
REFUSED = {
    "a temperature out of range": ("/v1/completions", body(temperature=-1), 400, "temperature"),
    "too many log probabilities": ("/v1/completions", body(logprobs=50), 400, "logprobs|50"),
    "a field that is not served": ("/v1/completions", body(vllm_xargs={"a": 1}), 400, "vllm_xargs"),
    "a field that is not served, in a chat": (
        "/v1/chat/completions",
        CHAT | {"vllm_xargs": {"a": 1}},
        400,
        "vllm_xargs",
    ),
    "an unknown model": ("/v1/completions", body(model="gpt-9"), 404, "gpt-9"),
    "a prompt longer than the model": ("/v1/completions", body(prompt=[5] * 9000), 400, "8192"),
    "a token that there is not": ("/v1/completions", body(prompt=[1, 4_000_000]), 400, "4000000|vocab"),
    "an image": (
        "/v1/chat/completions",
        {
            "model": MODEL,
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]}
            ],
        },
        400,
        "multimodal|image",
    ),
    "messages with a field that is not there": ("/v1/messages", {"model": MODEL, "max_tokens": 3}, 400, "messages"),
    "responses that name no input": ("/v1/responses", {"model": MODEL}, 400, "input"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_refusal_keeps_status_body_and_content_type(edge: Edge, case: str, streams: bool) -> None:
    """O-57: in stream mode as without it. O-14: a text model is given no images."""
    path, asked, status, message = REFUSED[case]
    answer = await edge.ask(path, **asked, **({"stream": True} if streams else {}))
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"].startswith("application/json")
    found = answer.json()
    said = str(found["error"]["message"] if isinstance(found.get("error"), dict) else found)
    assert any(part in said for part in message.split("|")), said


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], None], ids=repr)
async def test_an_empty_prompt_is_refused_or_answered_and_hurts_nobody(edge: Edge, prompt: object) -> None:
    """O-44: it must not reach an engine as a prompt of no tokens."""
    asked = body(max_tokens=2) | {"prompt": prompt} if prompt is not None else CHAT | {"messages": []}
    path = "/v1/chat/completions" if prompt is None else "/v1/completions"
    answer = await edge.ask(path, **asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"]
    assert (await edge.ask(**body(max_tokens=2))).json()["choices"][0]["token_ids"] == oracle(2)


async def test_headers_come_at_once_and_comments_while_the_prompt_is_computed(edge: Edge) -> None:
    """O-50: a prompt of seconds; a hop with an idle limit sees bytes all the time."""
    prompt = [(i * 11) % 30000 + 100 for i in range(8000)]
    slow = body(prompt=prompt, max_tokens=2)
    asked = asyncio.create_task(edge.stream(**body(prompt=prompt[::-1], max_tokens=2)))
    started_s = time.monotonic()
    async with edge.http.stream("POST", "/v1/completions", json={**slow, "stream": True}) as response:
        headers_s = time.monotonic() - started_s
        lines = [line async for line in response.aiter_lines()]
    first = next(i for i, line in enumerate(lines) if line.startswith("data: "))
    assert headers_s < 0.5
    assert response.headers["content-type"].startswith("text/event-stream")
    assert lines[-2:] == ["data: [DONE]", ""] or "data: [DONE]" in lines
    assert first >= 0
    assert (await asked).token_ids == oracle(2, prompt[::-1])


@asynccontextmanager
async def silent(model: str, fault: str, worker: str) -> AsyncIterator[Edge]:
    flags = ("--sse-comment-s", "0.1", "--handoff-timeout-s", "20")
    async with http_edge(model, router_flags=flags, own_flags={worker: ("--reference-faults", fault)}) as edge:
        yield edge


async def test_a_silent_prefill_is_bridged_with_comment_lines(model: str) -> None:
    """O-50: headers before the first token, comments until then, on every route that streams."""
    faults = (
        '[{"at_request": 1, "fault": "stall", "duration_s": 2}, {"at_request": 2, "fault": "stall", "duration_s": 1}]'
    )
    async with silent(model, faults, "prefill-0") as edge:
        started_s = time.monotonic()
        async with edge.http.stream("POST", "/v1/completions", json=body(stream=True, max_tokens=2)) as response:
            headers_s = time.monotonic() - started_s
            lines = [line async for line in response.aiter_lines()]
        before = [line for line in lines[: next(i for i, line in enumerate(lines) if line.startswith("data:"))] if line]
        assert headers_s < 1
        assert len(before) >= 5
        assert all(line.startswith(":") for line in before)
        messages = await edge.stream("/v1/messages", **CHAT, max_tokens=3, temperature=0)
        assert messages.comments >= 2
        assert messages.events[-1]["type"] == "message_stop"


DYING = {
    "/v1/completions": body(max_tokens=2000),
    "/v1/chat/completions": {
        **CHAT,
        "temperature": 0,
        "ignore_eos": True,
        "max_tokens": 2000,
        "return_token_ids": True,
    },
    "/v1/messages": {**CHAT, "temperature": 0, "max_tokens": 2000},
    "/v1/responses": {"model": MODEL, "input": "Hi.", "temperature": 0, "max_output_tokens": 2000},
}


async def test_a_worker_that_dies_ends_every_stream_with_an_error(model: str) -> None:
    """O-58: an error event, no end mark, no finish reason, on every route that streams."""
    own = {"decode-0": ("--reference-faults", '[{"at_step": 12, "fault": "exit"}]')}
    async with http_edge(model, own_flags=own, router_flags=("--prefill-attempts", "1")) as edge:
        answers = await asyncio.gather(*(edge.stream(path, **asked) for path, asked in DYING.items()))
    for path, answer in zip(DYING, answers, strict=True):
        assert answer.status == 200, path
        assert answer.errors, (path, answer.lines[-5:])
        assert not answer.ended, path
        kinds = {event.get("type") for event in answer.events}
        assert not kinds & {"message_stop", "response.completed"}, path
        reasons = [choice["finish_reason"] for event in answer.events for choice in event.get("choices", ())]
        assert not any(reasons), path
    assert len(answers[0].token_ids) > 1, "some of the answer had been sent"


async def test_a_retry_repeats_no_text(model: str) -> None:
    """O-59: a decode worker dies in the middle of two streams, another goes on from the tokens that were sent."""
    own = {"decode-0": ("--reference-faults", '[{"at_step": 12, "fault": "exit"}]')}
    async with http_edge(model, own_flags=own, decode=2) as edge:
        answers = await asyncio.gather(*(edge.stream(**body(max_tokens=60)) for _ in range(2)))
        assert [answer.token_ids for answer in answers] == [oracle(60)] * 2
        assert all(answer.ended and not answer.errors for answer in answers)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
async def test_a_client_that_goes_is_noticed_by_both_workers_within_a_second(edge: Edge, streams: bool) -> None:
    """O-62 and O-63: dropped while decode writes, and while prefill computes."""
    for prompt in (PROMPT, [(i * 17) % 30000 + 100 for i in range(8000)]):
        asked = {**body(prompt=prompt, max_tokens=100, ignore_eos=True), "stream": streams}
        asked["max_tokens"] = 8192 - len(prompt)
        async with httpx.AsyncClient(base_url=edge.http.base_url, timeout=30) as client:
            task = asyncio.create_task(client.post("/v1/completions", json=asked))
            await edge.cluster.until(lambda view: any(w.load.running_requests for w in view.workers))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        left_s = time.monotonic()
        await edge.cluster.empty()
        # Loads are reported twice a second at the latest.
        assert time.monotonic() - left_s < 1.5


async def test_readers_that_are_slow_cost_no_memory_and_no_time_of_others(edge: Edge) -> None:
    """O-64: thirty that read nothing, one that reads; what waits for the thirty is bounded by their answers."""
    router = psutil.Process(edge.cluster._processes["router"].pid)
    asked = body(max_tokens=2000, stream=True, logprobs=None, return_token_ids=None)
    await edge.stream(**body(max_tokens=200))
    before_bytes = router.memory_info().rss
    limits = httpx.Limits(max_connections=40)
    async with httpx.AsyncClient(base_url=edge.http.base_url, timeout=60, limits=limits) as client:
        slow = [client.build_request("POST", "/v1/completions", json=asked) for _ in range(30)]
        responses = await asyncio.gather(*(client.send(request, stream=True) for request in slow))
        assert (await edge.stream(**body(max_tokens=20))).token_ids == oracle(20)
        await edge.cluster.until(lambda view: not view.requests)
        assert router.memory_info().rss - before_bytes < 100 << 20
        for response in responses:
            await response.aclose()
    await edge.cluster.empty()
