"""The middleware around event streams, over an app that is made up."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200), pytest.mark.filterwarnings("ignore")]

Sent = list[dict[str, Any]]
App = Callable[[Callable[..., Awaitable[None]]], Awaitable[None]]
HEAD = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": body, "more_body": more}


async def serve(app: App, path: str = "/v1/completions", comment_s: float = 0, sent: Sent | None = None) -> Sent:
    """Everything that goes out, added to `sent` as it does."""
    from twostroke.router.vllm.event_stream import EventStreams

    sent = [] if sent is None else sent

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def whole(scope: Any, receive: Any, send: Any) -> None:
        await app(send)

    core = SimpleNamespace(sse_comment_s=comment_s)
    state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))
    scope = {"type": "http", "path": path, "app": SimpleNamespace(state=state)}
    await EventStreams(whole)(scope, None, send)  # type: ignore[arg-type]
    return sent


def body_of(sent: Sent) -> bytes:
    return b"".join(message.get("body", b"") for message in sent)


async def test_headers_wait_for_admission_and_then_go_out_at_once() -> None:
    from twostroke.router.vllm.event_stream import Admission

    counts: list[int] = []
    sent: Sent = []

    async def app(send: Any) -> None:
        await send(HEAD)
        await asyncio.sleep(0.01)
        counts.append(len(sent))
        Admission.accept()
        await asyncio.sleep(0.01)
        counts.append(len(sent))
        await send(part(b"data: 1\n\n"))
        await send(part(b"data: [DONE]\n\n", more=False))

    await serve(app, sent=sent)
    assert counts == [0, 1]
    assert sent[0] == HEAD
    assert body_of(sent) == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/v1/responses"])
async def test_a_refusal_becomes_an_answer_with_its_status(path: str) -> None:
    """O-57: whatever the app has sent or sends after it."""
    from vllm.exceptions import VLLMValidationError

    from twostroke.router.vllm.event_stream import Admission

    async def app(send: Any) -> None:
        await send(HEAD)
        await send(part(b"event: response.created\ndata: {}\n\n"))
        Admission.refuse(VLLMValidationError("no such thing"))
        await send(part(b'data: {"error": {}}\n\n'))
        await send(part(b"data: [DONE]\n\n", more=False))

    start, answer = await serve(app, path)
    assert start["status"] == 400
    assert dict(start["headers"])[b"content-type"] == b"application/json"
    assert json.loads(answer["body"])["error"]["message"] == "no such thing"


async def test_an_error_before_admission_is_a_refusal_too() -> None:
    async def app(send: Any) -> None:
        await send(HEAD)
        await send(part(b'data: {"error": {"message": "bad", "code": 422}}\n\n'))
        await send(part(b"data: [DONE]\n\n", more=False))

    start, answer = await serve(app)
    assert (start["status"], json.loads(answer["body"])["error"]["message"]) == (422, "bad")


async def test_an_error_after_admission_is_the_last_event() -> None:
    """O-58."""
    from twostroke.router.vllm.event_stream import Admission

    async def app(send: Any) -> None:
        await send(HEAD)
        Admission.accept()
        await send(part(b"data: 1\n\n"))
        await send(part(b'data: {"error": {"message": "lost"}}\n\n'))
        await send(part(b"data: [DONE]\n\n", more=False))

    assert body_of(await serve(app)) == b'data: 1\n\ndata: {"error": {"message": "lost"}}\n\n'


async def test_an_app_that_raises_ends_its_stream_with_an_error_event() -> None:
    """O-58."""
    from twostroke.router.vllm.event_stream import Admission

    async def app(send: Any) -> None:
        await send(HEAD)
        Admission.accept()
        await asyncio.sleep(0.01)
        await send(part(b"data: 1\n\n"))
        raise RuntimeError("lost")

    sent = await serve(app)
    last = body_of(sent).split(b"\n\n")[1]
    assert last.startswith(b"event: error\ndata: ")
    assert json.loads(last.partition(b"data: ")[2])["error"]["code"] == 500
    assert not sent[-1]["more_body"]


async def test_comments_fill_silence_between_events_and_never_follow_the_end() -> None:
    """O-50."""
    from twostroke.router.vllm.event_stream import COMMENT, Admission

    async def app(send: Any) -> None:
        await send(HEAD)
        Admission.accept()
        await asyncio.sleep(0.1)
        await send(part(b"data: half"))
        await asyncio.sleep(0.1)
        await send(part(b" and half\n\n"))
        await send(part(b"data: [DONE]\n\n", more=False))
        await asyncio.sleep(0.1)

    body = body_of(await serve(app, comment_s=0.02))
    assert body.startswith(COMMENT)
    assert body.endswith(b"data: half and half\n\ndata: [DONE]\n\n")
    assert 2 <= body.count(COMMENT) <= 5


async def test_what_is_no_event_stream_passes_untouched() -> None:
    head = {"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"application/json")]}

    async def app(send: Any) -> None:
        await send(head)
        await send(part(b"{}", more=False))

    assert await serve(app, comment_s=0.01) == [head, part(b"{}", more=False)]
