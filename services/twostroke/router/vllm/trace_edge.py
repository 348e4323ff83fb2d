"""ASGI middleware that makes one Edge of each request that vLLM's routes hand to the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from twostroke.router.access import TENANT_HEADER, Access, bearer
from twostroke.router.edge import OPERATIONS, Edge
from twostroke.router.ways import SLO_HEADER
from twostroke.rpc.trace_context import KEYS

_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

REJECTED = "REJECTED"
"""Error type of requests that never reached the cluster."""


class TraceEdge:
    """Added by its import path, as vLLM's --middleware wants it. Touches no message."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Serves one call within its edge."""
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        llm = scope["app"].state.engine_client
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        edge = Edge(
            llm.engine_core.tracer,
            operation,
            _model(llm),
            {key: value for key, value in headers.items() if key in KEYS},
            _tenant(llm.engine_core.access, headers),
            headers.get(SLO_HEADER, ""),
        )
        token = Edge.current.set(edge)
        try:
            await self._app(scope, receive, send)
        finally:
            Edge.current.reset(token)
            edge.end("" if edge.trails else REJECTED)


def _model(llm: Any) -> str:
    name = llm.model_config.served_model_name
    return str(name[0] if isinstance(name, list) else name)


def _tenant(access: Access, headers: Mapping[str, str]) -> str:
    # Anthropic's clients send x-api-key.
    key = bearer(headers.get("authorization", "")) or headers.get("x-api-key", "")
    return access.tenant(key, headers.get(TENANT_HEADER, ""))
