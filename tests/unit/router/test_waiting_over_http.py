"""What the HTTP middleware lets through while workers are away for a moment, and whose request it takes it for."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.router.access import Access
from twostroke.router.edge import Edge
from twostroke.router.vllm.gate import ReadinessGate
from twostroke.router.vllm.trace_edge import TraceEdge


class Rig:
    """A router whose workers are away: for a moment, unless `closed`."""

    def __init__(self, access: Access, closed: str = "") -> None:
        self.tenants: list[str] = []
        core = SimpleNamespace(
            access=access, tracer=None, closed_for=lambda: closed, waiting_for=lambda: "a decode worker (none)"
        )
        llm = SimpleNamespace(engine_core=core, model_config=SimpleNamespace(served_model_name="m"))
        self._state = SimpleNamespace(state=SimpleNamespace(engine_client=llm))

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        edge = Edge.current.get()
        assert edge is not None
        self.tenants.append(edge.tenant)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def ask(self, path: str, headers: dict[str, str] | None = None) -> tuple[int, dict[bytes, bytes], bytes]:
        sent: list[dict[str, Any]] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError("nobody reads the body here")

        raw = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
        scope = {"type": "http", "path": path, "method": "POST", "headers": raw, "app": self._state}
        await ReadinessGate(TraceEdge(self._serve))(scope, receive, send)
        return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


async def test_requests_wait_for_workers_while_all_else_says_that_they_are_away() -> None:
    rig = Rig(Access())
    assert (await rig.ask("/v1/completions"))[0] == 200
    status, headers, body = await rig.ask("/v1/models")
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert "a decode worker" in json.loads(body)["error"]["message"]


async def test_when_patience_has_ended_requests_are_refused_at_once() -> None:
    rig = Rig(Access(), closed="a decode worker (none)")
    status, headers, body = await rig.ask("/v1/chat/completions")
    assert (status, headers[b"retry-after"]) == (503, b"1")
    assert json.loads(body)["error"]["code"] == 503
    assert rig.tenants == []


@pytest.mark.parametrize("key", [{"authorization": "Bearer k"}, {"x-api-key": "k"}])
async def test_a_request_is_its_keys_tenants(key: dict[str, str]) -> None:
    closed, open_ = Rig(Access(["k"])), Rig(Access())
    await closed.ask("/v1/completions", {**key, "x-twostroke-tenant": "somebody else"})
    assert closed.tenants == [Access(["k"]).tenant("k", "")]
    await open_.ask("/v1/completions", {**key, "x-twostroke-tenant": "team"})
    await open_.ask("/v1/completions")
    assert open_.tenants == ["team", ""]
