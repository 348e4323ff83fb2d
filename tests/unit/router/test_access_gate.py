"""The outermost middleware, around an app that answers 200 with the number of bytes that it got."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.router.access import Access, Need
from twostroke.router.vllm.access_gate import AccessGate, need_of

LIMIT = 100


class Rig:
    def __init__(self, access: Access) -> None:
        self.reached: list[str] = []
        core = SimpleNamespace(access=access, max_body_bytes=LIMIT, console=self._console)
        self.app = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(engine_core=core)))

    async def _console(self, path: str, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(f"console {path}")
        await self._reply(send, b"")

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append(scope["path"])
        got, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                break
            got += len(message["body"])
            more = message.get("more_body", False)
        await self._reply(send, str(got).encode())

    async def _reply(self, send: Any, body: bytes) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})

    async def ask(
        self,
        path: str,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        chunks: tuple[bytes, ...] = (b"{}",),
        kind: str = "http",
    ) -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[dict[str, Any]] = []
        waiting = list(chunks)

        async def receive() -> dict[str, Any]:
            body = waiting.pop(0)
            return {"type": "http.request", "body": body, "more_body": bool(waiting)}

        async def send(message: Any) -> None:
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {
            "type": kind,
            "path": path,
            "method": method,
            "headers": raw,
            "client": ("10.0.0.1", 5),
            "app": self.app,
        }
        await AccessGate(self._serve)(scope, receive, send)
        if kind == "websocket":
            return (sent[0].get("code", 200) if sent[0]["type"] == "websocket.close" else 200), {}, b""
        assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


KEYED = Access(["one"], "boss")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/docs", "/anything/new", "/console/api/state"])
async def test_everything_that_is_not_known_to_be_open_needs_a_key(path: str) -> None:
    rig = Rig(KEYED)
    status, headers, body = await rig.ask(path)
    assert (status, headers[b"www-authenticate"]) == (401, b"Bearer")
    assert json.loads(body)["error"]["type"] == "AuthenticationError"
    assert rig.reached == []


@pytest.mark.parametrize(
    "path", ["/health", "/ping", "/version", "/metrics", "/console", "/console/", "/console/app.js"]
)
async def test_what_says_nothing_secret_is_open(path: str) -> None:
    assert (await Rig(KEYED).ask(path, method="GET"))[0] == 200


@pytest.mark.parametrize(
    "headers", [{"authorization": "Bearer one"}, {"x-api-key": "one"}, {"authorization": "Bearer boss"}]
)
async def test_a_key_is_taken_as_openai_and_as_anthropic_send_it(headers: dict[str, str]) -> None:
    rig = Rig(KEYED)
    assert (await rig.ask("/v1/messages", headers=headers))[0] == 200
    assert rig.reached == ["/v1/messages"]


async def test_admin_paths_need_the_admin_key() -> None:
    for path in ("/v1/load_lora_adapter", "/console/api/actions/Drain"):
        assert need_of(path) is Need.ADMIN
        assert (await Rig(KEYED).ask(path, headers={"authorization": "Bearer one"}))[0] == 403
        assert (await Rig(KEYED).ask(path, headers={"authorization": "Bearer boss"}))[0] == 200


async def test_a_browser_may_ask_what_it_may_send() -> None:
    assert (await Rig(KEYED).ask("/v1/models", method="OPTIONS"))[0] == 200


async def test_a_websocket_needs_a_key_too() -> None:
    assert (await Rig(KEYED).ask("/v1/realtime", kind="websocket"))[0] == 1008


async def test_who_asks_too_often_is_told_when_to_come_back() -> None:
    rig = Rig(Access(rate_per_s=0.4, burst=1, clock=lambda: 1.0))
    assert (await rig.ask("/v1/completions"))[0] == 200
    status, headers, body = await rig.ask("/v1/completions")
    assert (status, headers[b"retry-after"]) == (429, b"3")
    assert "--rate-per-s" in json.loads(body)["error"]["message"]
    assert (await rig.ask("/v1/models", method="GET"))[0] == 200


async def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    rig = Rig(Access())
    status, _, body = await rig.ask("/v1/completions", headers={"content-length": "101"})
    assert status == 413
    assert "--max-body-bytes" in json.loads(body)["error"]["message"]
    assert rig.reached == []


async def test_a_body_that_becomes_too_large_is_cut_off() -> None:
    assert (await Rig(Access()).ask("/v1/completions", chunks=(b"x" * 60, b"x" * 60, b"x" * 60)))[0] == 413
    assert (await Rig(Access()).ask("/v1/completions", chunks=(b"x" * 50, b"x" * 50)))[2] == b"100"
