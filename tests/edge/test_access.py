"""Keys and certificates on the HTTP edge as it is served, vLLM's own routes included."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import httpx
import pytest

from cluster.reference_cluster import free_ports, running
from edge.http_cluster import MODEL, START_S, body
from twostroke.launch.certs import make

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(200)]
KEY, ADMIN = "key-of-a-client-8830", "key-of-an-admin-1174"


async def test_https_with_keys(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, [], 1)
    monkeypatch.setenv("TWOSTROKE_API_KEYS", KEY)
    monkeypatch.setenv("TWOSTROKE_ADMIN_KEY", ADMIN)
    port = free_ports(1)[0]
    flags = (
        *("--front-end", "vllm", "--model", model, "--served-model-name", MODEL, "--http-port", str(port)),
        *("--http-tls-cert", str(tmp_path / "router.pem"), "--http-tls-key", str(tmp_path / "router-key.pem")),
        *("--http-tls-ca", str(tmp_path / "ca.pem"), "--max-body-bytes", "2000"),
    )
    trust = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    trust.load_cert_chain(tmp_path / "client.pem", tmp_path / "client-key.pem")
    async with (
        running(router_flags=flags, wait=False) as cluster,
        httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=trust, timeout=30) as http,
    ):
        keyed = {"Authorization": f"Bearer {KEY}"}
        async with asyncio.timeout(START_S):
            while not await serves(http, keyed):  # noqa: ASYNC110 another process starts
                await asyncio.sleep(0.2)
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/console")).status_code == 200
        refused = await http.post("/v1/completions", json=body())
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "AuthenticationError")
        answer = await http.post("/v1/completions", json=body(), headers=keyed)
        assert answer.status_code == 200, answer.text
        assert (await http.get("/console/api/state")).status_code == 401
        state = (await http.get("/console/api/state", headers=keyed)).json()
        assert [request["state"] for request in state["requests"]] == ["REQUEST_STATE_FINISHED"]
        drain = "/console/api/actions/Drain"
        assert (await http.post(drain, json={"worker_id": "decode-0"}, headers=keyed)).status_code == 403
        unknown = await http.post(drain, json={"worker_id": "x"}, headers={"x-api-key": ADMIN})
        assert unknown.status_code == 400, unknown.text
        drained = await http.post(drain, json={"worker_id": "decode-0"}, headers={"x-api-key": ADMIN})
        assert drained.status_code == 200, drained.text
        assert await asyncio.to_thread(cluster.wait_exit, "decode-0") == 0
        large = await http.post("/v1/completions", json=body(prompt="x" * 3000), headers=keyed)
        assert large.status_code == 413
        plain = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=plain) as stranger:
            with pytest.raises(httpx.TransportError):
                await stranger.get("/health")
        log = cluster.log("router")
        assert KEY not in log
        assert ADMIN not in log


async def serves(http: httpx.AsyncClient, headers: dict[str, str]) -> bool:
    try:
        return (await http.get("/v1/models", headers=headers)).status_code == 200
    except httpx.TransportError:
        return False
