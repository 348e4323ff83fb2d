"""Where Prometheus scrapes: one path, on the event loop whose numbers it shows, without a thread or a framework."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from twostroke.errors import ConfigError

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
REQUEST_TIMEOUT_S = 5.0
MAX_REQUEST_BYTES = 16 << 10


class ScrapeEndpoint:
    """GET /metrics. render: makes the text."""

    def __init__(self, render: Callable[[], bytes]) -> None:
        self._render = render
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listens; returns the port, which 0 leaves to the system. Raises ConfigError when it is taken."""
        try:
            self._server = await asyncio.start_server(self._serve, host, port, limit=MAX_REQUEST_BYTES)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} for metrics: {error.strerror or error}; "
                "choose another with --metrics-port, 0 for any, or --no-metrics for none"
            ) from error
        bound = int(self._server.sockets[0].getsockname()[1])
        log.info("metrics on http://%s:%d/metrics", f"[{host}]" if ":" in host else host, bound)
        return bound

    async def close(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head.split(b" ", 2)[:2]))
                await writer.drain()
        writer.close()

    def _answer(self, asked: list[bytes]) -> bytes:
        status, kind, body = "404 Not Found", "text/plain", b"metrics are at /metrics\n"
        if asked[0] not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", b"GET /metrics\n"
        elif asked[1].partition(b"?")[0] == b"/metrics":
            status, kind, body = "200 OK", CONTENT_TYPE, self._render()
        head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        return head.encode() + (b"" if asked[0] == b"HEAD" else body)
