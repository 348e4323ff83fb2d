"""Traces, metrics and the log line of requests that come over HTTP."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from edge.http_cluster import Edge, body, http_edge
from telemetry.traces import Receiver, Span, receiver

CALLER = "00f067aa0ba902b7"

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Receiver]:
    with receiver(tmp_path_factory.mktemp("spans")) as running_receiver:
        yield running_receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def traced(model: str, found: Receiver) -> AsyncIterator[Edge]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = ("--otlp-endpoint", found.address)
        async with http_edge(model, router_flags=(*flags, "--log-format", "json"), worker_flags=flags) as edge:
            yield edge


def traceparent(trace: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{CALLER}-01"}


def of(spans: Sequence[Span], trace: str) -> list[Span]:
    return [span for span in spans if span.trace == trace]


async def test_a_streamed_chat_of_two_choices_is_one_tree(traced: Edge, found: Receiver) -> None:
    """O-94, O-97: also through vLLM's own front end."""
    trace = "a" * 32
    asked = {
        "model": "reference",
        "messages": [{"role": "user", "content": "Name a colour."}],
        "n": 2,
        "stream": True,
        "max_tokens": 6,
        "temperature": 0.8,
        "seed": 1,
        "ignore_eos": True,
    }
    async with traced.http.stream("POST", "/v1/chat/completions", json=asked, headers=traceparent(trace)) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line.startswith("data: {")]
    public_id = json.loads(lines[0].removeprefix("data: "))["id"]
    spans = of(await found.until(lambda spans: len(of(spans, trace)) >= 13), trace)
    edge = next(span for span in spans if span.kind == 2)
    assert (edge.name, edge.parent) == ("chat reference", CALLER)
    each = ("place", "prefill.queue", "prefill.run", "handoff", "decode.wait", "decode.run")
    assert Counter(span.name for span in spans) == Counter({"chat reference": 1, **dict.fromkeys(each, 2)})
    assert {span.parent for span in spans if span is not edge} == {edge.id}
    assert len({span.attributes.get("twostroke.request_id") for span in spans if span.name == "place"}) == 2
    assert edge.attributes["gen_ai.usage.output_tokens"] == 12
    assert edge.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    written = [json.loads(line) for line in traced.cluster.log("router").splitlines() if "is over" in line]
    mine = [line for line in written if line.get("trace_id") == trace]
    assert [(line["finish"], line["completion_tokens"], line["operation"]) for line in mine] == [
        ("length", 6, "chat")
    ] * 2
    assert all(line["ttft_ms"] > 0 and line["handoff_bytes"] > 0 for line in mine)
    assert public_id.endswith(mine[0]["public_id"]) or mine[0]["public_id"].endswith(public_id)


async def test_a_request_that_is_refused_has_an_edge_span_only(traced: Edge, found: Receiver) -> None:
    trace = "b" * 32
    response = await traced.http.post("/v1/completions", json=body(max_tokens=-1), headers=traceparent(trace))
    assert response.status_code == 400
    spans = of(await found.until(lambda spans: bool(of(spans, trace))), trace)
    assert [(span.name, span.attributes["error.type"]) for span in spans] == [("text_completion reference", "REJECTED")]


async def test_other_routes_make_no_span(traced: Edge, found: Receiver) -> None:
    trace = "c" * 32
    assert (await traced.http.get("/v1/models", headers=traceparent(trace))).status_code == 200
    await traced.http.post("/v1/completions", json=body(), headers=traceparent("d" * 32))
    spans = await found.until(lambda spans: len(of(spans, "d" * 32)) == 7)
    assert not of(spans, trace)


async def test_the_real_metrics_of_http_requests(traced: Edge) -> None:
    log = traced.cluster.log("router")
    port = next(
        json.loads(line)["message"].split(":")[-1].split("/")[0] for line in log.splitlines() if "metrics on" in line
    )
    text = (await traced.http.get(f"http://127.0.0.1:{port}/metrics")).text
    chat = 'gen_ai_operation_name="chat",gen_ai_provider_name="twostroke",gen_ai_request_model="reference"'
    assert f"gen_ai_server_time_to_first_token_seconds_count{{{chat}}} 2.0" in text
