"""vLLM's front end over workers on the reference engine: the whole HTTP edge, and answers known beforehand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.reference_cluster import Cluster, free_ports, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.v1.engine_pb2 import SamplingParams

START_S = 150.0
MODEL = "reference"
PROMPT = [(i * 7919) % 40000 + 100 for i in range(40)]


def oracle(count: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """The tokens that every greedy answer to the prompt has."""
    return expected_tokens(list(prompt), SamplingParams(temperature=0), count)


def body(**more: Any) -> dict[str, Any]:
    """A completion that goes on until max_tokens and reports its token ids."""
    common = {"model": MODEL, "prompt": PROMPT, "temperature": 0, "max_tokens": 8}
    return {**common, "ignore_eos": True, "return_token_ids": True, **more}


@dataclass
class Streamed:
    """A streamed answer, line by line."""

    status: int
    content_type: str
    lines: list[str] = field(default_factory=list)

    @property
    def events(self) -> list[dict[str, Any]]:
        data = [line.removeprefix("data: ") for line in self.lines if line.startswith("data: ")]
        return [json.loads(text) for text in data if text != "[DONE]"]

    @property
    def ended(self) -> bool:
        return "data: [DONE]" in self.lines

    @property
    def comments(self) -> int:
        return sum(line.startswith(":") for line in self.lines)

    @property
    def token_ids(self) -> list[int]:
        return [token for event in self.events for choice in event.get("choices", ()) for token in choice["token_ids"]]

    @property
    def errors(self) -> list[dict[str, Any]]:
        return [event["error"] for event in self.events if "error" in event]


@dataclass
class Edge:
    """A cluster and a client of its HTTP server."""

    cluster: Cluster
    http: httpx.AsyncClient

    async def ask(self, path: str = "/v1/completions", /, **asked: Any) -> httpx.Response:
        return await self.http.post(path, json=asked or body())

    async def stream(self, path: str = "/v1/completions", /, **asked: Any) -> Streamed:
        async with self.http.stream("POST", path, json={**(asked or body()), "stream": True}) as response:
            answer = Streamed(response.status_code, response.headers["content-type"])
            async for line in response.aiter_lines():
                answer.lines.append(line)
        return answer


@asynccontextmanager
async def http_edge(
    model: str,
    *,
    router_flags: Sequence[str] = (),
    worker_flags: Sequence[str] = (),
    own_flags: dict[str, Sequence[str]] | None = None,
    decode: int = 1,
) -> AsyncIterator[Edge]:
    """A cluster that answers over HTTP."""
    port = free_ports(1)[0]
    flags = (
        *("--front-end", "vllm", "--model", model, "--served-model-name", MODEL, "--http-port", str(port)),
        *("--vllm-args", "--enable-prompt-tokens-details --enable-auto-tool-choice --tool-call-parser hermes"),
        *router_flags,
    )
    async with (
        running(1, decode, router_flags=flags, worker_flags=worker_flags, own_flags=own_flags, wait=False) as cluster,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as http,
    ):
        async with asyncio.timeout(START_S):
            while not await _serves(http):  # noqa: ASYNC110 another process starts
                await asyncio.sleep(0.2)
        await cluster.ready(1 + decode)
        yield Edge(cluster, http)


async def _serves(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/v1/models")).status_code == 200
    except httpx.TransportError:
        return False
