"""ASGI middleware in front of vLLM's routes: 503 with a reason until the cluster can serve."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# These are about the router process itself, or need no engine.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json", "/load"})


class ReadinessGate:
    """Added by its import path, as vLLM's --middleware wants it."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Passes a request on, or answers that nothing can be served yet and why."""
        core = scope["app"].state.engine_client.engine_core
        if scope["type"] == "lifespan":
            core.on_http_start()
        elif scope["type"] == "http" and scope["path"] not in OPEN_PATHS and (waiting_for := core.waiting_for()):
            await _unavailable(send, f"the router is not ready: it waits for {waiting_for}")
            return
        await self._app(scope, receive, send)


async def _unavailable(send: _Send, message: str) -> None:
    body = json.dumps(
        {"error": {"message": message, "type": "ServiceUnavailableError", "code": 503, "param": None}}
    ).encode()
    headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": body})
