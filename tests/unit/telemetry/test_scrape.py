"""The endpoint that Prometheus scrapes."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest

from twostroke.errors import ConfigError
from twostroke.telemetry.scrape import ScrapeEndpoint


@pytest.fixture
async def port() -> AsyncIterator[int]:
    endpoint = ScrapeEndpoint(lambda: b"a 1\n")
    yield await endpoint.start("127.0.0.1", 0)
    await endpoint.close()


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/metrics", 200, "a 1\n"),
        ("GET", "/metrics?name=a", 200, "a 1\n"),
        ("HEAD", "/metrics", 200, ""),
        ("GET", "/", 404, "metrics are at /metrics\n"),
        ("POST", "/metrics", 405, "GET /metrics\n"),
    ],
)
async def test_answers(port: int, method: str, path: str, status: int, text: str) -> None:
    async with httpx.AsyncClient() as client:
        answer = await client.request(method, f"http://127.0.0.1:{port}{path}")
    assert (answer.status_code, answer.text) == (status, text)
    if status == 200:
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"


async def test_nonsense_ends_the_connection_and_nothing_else(port: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x" * 40_000)
    assert await reader.read() == b""
    writer.close()
    await test_answers(port, "GET", "/metrics", 200, "a 1\n")


async def test_a_port_that_is_taken_is_named(port: int) -> None:
    with pytest.raises(ConfigError, match="--metrics-port"):
        await ScrapeEndpoint(lambda: b"").start("127.0.0.1", port)
