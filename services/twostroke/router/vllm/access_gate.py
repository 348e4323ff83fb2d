"""ASGI middleware in front of everything: keys, shares, the size of bodies, and the console."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from twostroke.errors import HTTP_STATUS, TwostrokeError
from twostroke.router.access import Need, bearer
from twostroke.router.console.pages import API, is_page
from twostroke.router.vllm.gate import answer

_Scope = MutableMapping[str, Any]
_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]

OPEN_PATHS = frozenset({"/health", "/ping", "/version", "/metrics"})
ADMIN_PATHS = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter"})
_ADMIN_PREFIX = f"{API}/actions/"
_WRITES = frozenset({"POST", "PUT", "PATCH"})

_KINDS = {401: "AuthenticationError", 403: "PermissionDeniedError", 429: "RateLimitError"}


class AccessGate:
    """Added by its import path, as vLLM's --middleware wants it."""

    def __init__(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: _Scope, receive: _Receive, send: _Send) -> None:
        """Passes a call on, or refuses it: 401, 403, 413, 429."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        core = scope["app"].state.engine_client.engine_core
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        try:
            _check(core.access, scope, path)
        except TwostrokeError as error:
            await _refuse(scope, send, error)
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
        elif path == "/console" or path.startswith("/console/"):
            await core.console(path, scope, receive, send)
        else:
            await _Body(receive, send, core.max_body_bytes).serve(self._app, scope)


def need_of(path: str) -> Need:
    """What a path needs. What is not known here needs a key."""
    if path in OPEN_PATHS or is_page(path):
        return Need.NOTHING
    return Need.ADMIN if path in ADMIN_PATHS or path.startswith(_ADMIN_PREFIX) else Need.USE


def _check(access: Any, scope: _Scope, path: str) -> None:
    method = scope.get("method", "GET")
    # A browser asks by OPTIONS what it may send, and never sends a key with that.
    need = Need.NOTHING if method == "OPTIONS" else need_of(path)
    headers = _headers(scope)
    # Anthropic's clients send x-api-key.
    key = bearer(headers.get(b"authorization", b"").decode("latin-1")) or headers.get(b"x-api-key", b"").decode(
        "latin-1"
    )
    client = scope.get("client")
    access.check(need, key, client[0] if client else "", counted=method in _WRITES)


def _headers(scope: _Scope) -> Mapping[bytes, bytes]:
    return dict(scope["headers"])


async def _refuse(scope: _Scope, send: _Send, error: TwostrokeError) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": error.message})
        return
    status = HTTP_STATUS[error.code]
    more = [(b"www-authenticate", b"Bearer")] if status == 401 else []
    if error.retry_after_s is not None:
        more.append((b"retry-after", str(math.ceil(error.retry_after_s)).encode()))
    await answer(send, status, _KINDS[status], error.message, more)


class _Body:
    """Counts what one call's client sends."""

    def __init__(self, receive: _Receive, send: _Send, limit_bytes: int) -> None:
        self._receive = receive
        self._send = send
        self._limit_bytes = limit_bytes
        self._received_bytes = 0
        self._answered = self._refused = False

    async def serve(self, app: Callable[[_Scope, _Receive, _Send], Awaitable[None]], scope: _Scope) -> None:
        length = _headers(scope).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._limit_bytes:
            await self._too_large()
            return
        await app(scope, self._count, self._pass)

    async def _count(self) -> _Message:
        message = await self._receive()
        self._received_bytes += len(message.get("body", b""))
        if self._received_bytes <= self._limit_bytes:
            return message
        if not self._answered and not self._refused:
            await self._too_large()
        return {"type": "http.disconnect"}

    async def _pass(self, message: _Message) -> None:
        if not self._refused:
            self._answered = True
            await self._send(message)

    async def _too_large(self) -> None:
        self._refused = True
        message = f"the request is larger than {self._limit_bytes} bytes (--max-body-bytes)"
        await answer(self._send, 413, "RequestTooLargeError", message, [(b"connection", b"close")])
