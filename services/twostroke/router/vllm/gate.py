"""ASGI middleware in front of vLLM's routes: 503 until the cluster can serve, 404 for what it never does, and why."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

from twostroke.router.edge import OPERATIONS

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

# These are about the router process itself, or need no engine.
OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics", "/docs", "/openapi.json", "/load"})

# Routes of vLLM's server that are about the one engine behind it.
NOT_SERVED = {
    "/scale_elastic_ep": "it scales data parallel engines; start or stop workers instead",
    "/is_scaling_elastic_ep": "it is about data parallel engines",
    "/kv_event_sources": "it names one engine's events",
    "/v1/systemone": "no model that is served here decides by it",
}


class ReadinessGate:
    """Added by its import path, as vLLM's --middleware wants it."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Passes a request on, or answers why it cannot be served, now or ever."""
        core = scope["app"].state.engine_client.engine_core
        if scope["type"] == "lifespan":
            core.on_http_start()
        elif scope["type"] == "http" and scope["path"] not in OPEN_PATHS and (waiting_for := _closed_for(core, scope)):
            message = f"the router is not ready: it waits for {waiting_for}"
            await answer(send, 503, "ServiceUnavailableError", message, [(b"retry-after", b"1")])
            return
        elif scope["type"] == "http" and (why := NOT_SERVED.get(scope["path"])):
            await answer(send, 404, "NotFoundError", f"{scope['path']} is not served through two pools: {why}")
            return
        await self._app(scope, receive, send)


def _closed_for(core: Any, scope: _Scope) -> str:
    # What is asked of the workers waits for them for a moment.
    return str(core.closed_for() if scope["path"] in OPERATIONS else core.waiting_for())


async def answer(send: _Send, status: int, kind: str, message: str, more: Sequence[tuple[bytes, bytes]] = ()) -> None:
    """An error in OpenAI's shape. more: further headers."""
    body = json.dumps({"error": {"message": message, "type": kind, "code": status, "param": None}}).encode()
    headers = [(b"content-type", b"application/json"), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
