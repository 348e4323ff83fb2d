"""ASGI middleware around vLLM's event streams.

vLLM's servers begin a stream before its request is accepted, fall silent while a prompt is computed, and end with the
end mark whatever happened. Here a request that is refused keeps its status and its JSON body, a stream that is silent
gets comment lines, and one that broke ends with its error.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import time
from collections.abc import Awaitable, Callable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from vllm.entrypoints.serve.exception_handling.error_response import create_error_response

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

COMMENT = b": twostroke is at work\n\n"
# They hand one request or more to the cluster core before anything that they send matters.
_GENERATING = frozenset(
    {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate"}
)
_ERROR, _DONE = (b'data: {"error"', b"event: error"), b"data: [DONE]"


class Admission:
    """Whether the cluster took a request of the HTTP call within which this is current."""

    current: ContextVar[Admission | None] = ContextVar("admission", default=None)

    def __init__(self) -> None:
        self.settled = asyncio.Event()
        self.refusal: Exception | None = None

    @classmethod
    def accept(cls) -> None:
        """Says that it did."""
        if admission := cls.current.get():
            admission.settled.set()

    @classmethod
    def refuse(cls, error: Exception) -> None:
        """Says that it did not, and why; the first word counts."""
        if (admission := cls.current.get()) and not admission.settled.is_set():
            admission.refusal = error
            admission.settled.set()


class EventStreams:
    """Added by its import path, as vLLM's --middleware wants it."""

    def __init__(self, app: Callable[[Any, Any, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Send) -> None:
        """Serves one call; what is not an event stream passes untouched."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        stream = _Stream(send, scope["path"], scope["app"].state.engine_client.engine_core.sse_comment_s)
        token = Admission.current.set(stream.admission)
        try:
            await self._app(scope, receive, stream.send)
        except Exception as error:
            if not await stream.end_with(error):
                raise
        finally:
            Admission.current.reset(token)
            await stream.close()


class _Stream:
    """One response on its way out."""

    def __init__(self, send: Send, path: str, comment_s: float) -> None:
        self.admission = Admission()
        self._send = send
        self._path = path
        self._comment_s = comment_s
        self._head: Message | None = None
        self._held: list[Message] = []
        self._events = self._open = self._failed = self._refused = False
        self._complete = True
        """Whether what was sent ends with an event's end, so that a comment may follow."""
        self._sent_s = 0.0
        self._sending = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    async def send(self, message: Message) -> None:
        """Takes what the app sends."""
        if self._refused:
            return
        if message["type"] == "http.response.start":
            _add_retry_after(message, self.admission.refusal)
            self._events = _is_event_stream(message)
            if self._events and self._path in _GENERATING:
                self._head = message
                self._tasks.append(asyncio.create_task(self._release_when_settled()))
                return
            if self._events:
                self._begin_comments()
        if not self._events:
            await self._send(message)
        elif self._head is None:
            await self._pass(message)
        else:
            self._held.append(message)
            if message.get("body", b"").startswith(_ERROR) or not message.get("more_body"):
                await self._release()

    async def _release_when_settled(self) -> None:
        await self.admission.settled.wait()
        await self._release()

    async def _release(self) -> None:
        """Sends the head and what was held behind it, or the refusal instead."""
        async with self._sending:
            head, self._head = self._head, None
            if head is None:
                return
            if error := self._refusal():
                self._refused = True
                await _answer(self._send, self._path, error, self.admission.refusal)
                return
            self._begin_comments()
            await self._send(head)
            held, self._held = self._held, []
            for message in held:
                await self._transmit(message)

    def _refusal(self) -> dict[str, Any] | None:
        if self.admission.refusal is not None:
            return _describe(self.admission.refusal)
        body = self._held[0].get("body", b"") if self._held else b""
        if self.admission.settled.is_set() or not body.startswith(_ERROR):
            return None
        found: dict[str, Any] = json.loads(body.partition(b"data: ")[2].splitlines()[0])["error"]
        # Nothing was started, so it is the request that is wrong.
        return {"code": int(HTTPStatus.BAD_REQUEST)} | found

    async def _pass(self, message: Message) -> None:
        async with self._sending:
            await self._transmit(message)

    async def _transmit(self, message: Message) -> None:
        body = message.get("body", b"")
        if message["type"] == "http.response.body":
            if self._failed and body.startswith(_DONE):
                # The mark of a complete answer, which this is not.
                message = {**message, "body": b""}
            elif body:
                self._failed = self._failed or body.startswith(_ERROR)
                self._complete = body.endswith(b"\n\n")
            self._open = bool(message.get("more_body"))
            self._sent_s = time.monotonic()
        await self._send(message)

    def _begin_comments(self) -> None:
        self._open, self._sent_s = True, time.monotonic()
        if self._comment_s:
            self._tasks.append(asyncio.create_task(self._comment()))

    async def _comment(self) -> None:
        while True:
            await asyncio.sleep(self._comment_s - (time.monotonic() - self._sent_s))
            async with self._sending:
                if time.monotonic() - self._sent_s < self._comment_s:
                    continue
                self._sent_s = time.monotonic()
                if self._open and self._complete:
                    await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})

    async def end_with(self, error: Exception) -> bool:
        """Ends a stream that broke: with its error as the last event, or when nothing was sent yet, as a refusal."""
        if not self._events:
            return False
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        if self._head is not None:
            self.admission.refusal = self.admission.refusal or cause
            await self._release()
            return True
        if self._open:
            event = {"type": "error", "error": _describe(cause)}
            body = f"event: error\ndata: {json.dumps(event)}\n\n".encode()
            await self._pass({"type": "http.response.body", "body": body, "more_body": False})
        return True

    async def close(self) -> None:
        """Ends what runs beside the stream."""
        for task in self._tasks:
            task.cancel()
        with contextlib.suppress(Exception):
            await asyncio.gather(*self._tasks, return_exceptions=True)


def _is_event_stream(start: Message) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in start.get("headers", ())
    )


def _describe(error: Exception) -> dict[str, Any]:
    described: dict[str, Any] = create_error_response(error).error.model_dump()
    return described


async def _answer(send: Send, path: str, error: dict[str, Any], refusal: Exception | None) -> None:
    code = error.get("code")
    status = code if isinstance(code, int) and 400 <= code < 600 else int(HTTPStatus.INTERNAL_SERVER_ERROR)
    content: dict[str, Any] = {"error": error}
    if path == "/v1/messages":
        content = {"type": "error", "error": {"type": error.get("type"), "message": error.get("message")}}
    body = json.dumps(content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    start: Message = {"type": "http.response.start", "status": status, "headers": headers}
    _add_retry_after(start, refusal)
    await send(start)
    await send({"type": "http.response.body", "body": body})


def _add_retry_after(start: Message, refusal: Exception | None) -> None:
    if start["status"] in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE):
        wait_s = getattr(refusal.__cause__, "retry_after_s", None) if refusal else None
        start["headers"] = [*start.get("headers", ()), (b"retry-after", str(math.ceil(wait_s or 1)).encode())]
