"""Refusals for want of room, and waits for workers, in OpenAI's shape: 429 and 503 with Retry-After."""

import asyncio
from typing import Any

import httpx
import pytest

from edge.http_cluster import PROMPT, Edge, body, http_edge, oracle

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200), pytest.mark.asyncio(loop_scope="package")]

# A decode worker has room for one answer to a prompt of 40 tokens that may get long; another waits.
SMALL = {"decode-0": ("--reference-blocks", "16", "--reference-step-ms", "20")}
ROUTER = ("--queue-requests", "1", "--patience-s", "1", "--max-model-len-tokens", "256")


def long_body(**more: Any) -> dict[str, Any]:
    return body(max_tokens=180, **more)


async def refused(edge: Edge, status: int, streams: bool, headers: dict[str, str] | None = None) -> httpx.Response:
    response = await edge.http.post("/v1/completions", json=long_body(stream=streams), headers=headers)
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    assert response.headers.get_list("retry-after") == [response.headers["retry-after"]]
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["error"]["code"] == status
    return response


async def test_a_full_queue_is_a_429_and_workers_that_stay_away_are_a_503(model: str) -> None:
    async with http_edge(model, router_flags=ROUTER, own_flags=SMALL) as edge:
        asked = [asyncio.create_task(edge.ask(**long_body())) for _ in range(2)]
        await edge.cluster.until(lambda view: view.requests == 2)
        for streams in (False, True):
            answer = await refused(edge, 429, streams)
            assert "1 requests of priority 0 wait already" in answer.json()["error"]["message"]
        for answer in await asyncio.gather(*asked):
            assert answer.json()["choices"][0]["token_ids"] == oracle(180)

        edge.cluster.kill("decode-0")
        await edge.cluster.until(lambda view: not view.ready)
        await refused(edge, 503, streams=False)
        for streams in (False, True):
            answer = await refused(edge, 503, streams)
            assert "decode worker" in answer.json()["error"]["message"]


async def test_a_connection_that_was_idle_is_not_closed_under_the_next_request(edge: Edge) -> None:
    """O-91: for longer than vLLM's own five seconds, which proxies that keep theirs for a minute take for a 502."""
    limits = httpx.Limits(max_connections=1, keepalive_expiry=60)
    async with httpx.AsyncClient(base_url=edge.http.base_url, timeout=30, limits=limits) as client:
        ports = set()
        for idle_s in (0, 6, 6):
            await asyncio.sleep(idle_s)
            async with client.stream("POST", "/v1/completions", json=body(max_tokens=2)) as response:
                ports.add(response.extensions["network_stream"].get_extra_info("client_addr"))
                await response.aread()
            assert response.json()["choices"][0]["token_ids"] == oracle(2, PROMPT)
        assert len(ports) == 1
