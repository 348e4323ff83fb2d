"""Keys and certificates on a whole cluster."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.reference_cluster import running
from twostroke.client import AsyncClient
from twostroke.config import RpcSettings
from twostroke.errors import UnauthenticatedError, UnavailableError
from twostroke.launch import cluster as launch_cluster
from twostroke.launch.certs import SERVER_NAME, make

KEY, ADMIN = "key-of-a-client-7261", "key-of-an-admin-9152"


async def test_a_router_with_keys_answers_who_has_one_and_logs_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TWOSTROKE_ADMIN_KEY", ADMIN)
    (tmp_path / "keys").write_text(f"{KEY}\n")
    flags = ("--api-keys-file", str(tmp_path / "keys"), "--log-level", "DEBUG")
    async with running(router_flags=flags, wait=False) as cluster:
        target = f"127.0.0.1:{cluster.ports['router']}"
        async with AsyncClient(target, api_key=KEY, retries=20, timeout_s=20) as client:
            answer = await client.complete([1, 2, 3], max_tokens=4)
            assert len(answer.token_ids) == 4
        for wrong in (None, "invented"):
            async with AsyncClient(target, api_key=wrong) as client:
                with pytest.raises(UnauthenticatedError):
                    await client.list_models(timeout_s=5)
        monkeypatch.setenv("TWOSTROKE_API_KEY", KEY)
        assert (await launch_cluster.fetch(target, 5)).ready
        assert [request.completion_tokens for request in await launch_cluster.requests(target, 5, 5)] == [4]
        monkeypatch.setenv("TWOSTROKE_API_KEY", "invented")
        for call in (launch_cluster.fetch(target, 5), launch_cluster.follow(target, lambda _: None, 5)):
            with pytest.raises(UnauthenticatedError, match="TWOSTROKE_API_KEY"):
                await call
        log = cluster.log("router")
        assert "ready" in log
        assert KEY not in log
        assert ADMIN not in log
        assert "invented" not in log


async def test_a_cluster_that_speaks_mutual_tls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make(tmp_path, [], 1)
    files = {"tls_ca": "ca.pem", "tls_cert": "worker.pem", "tls_key": "worker-key.pem"}
    group = {name: str(tmp_path / file) for name, file in files.items()} | {"tls_server_name": SERVER_NAME}
    monkeypatch.setenv("TWOSTROKE_RPC", json.dumps(group))
    async with running(wait=False) as cluster:
        target = f"127.0.0.1:{cluster.ports['router']}"
        async with AsyncClient(target, rpc=RpcSettings(**group), retries=20, timeout_s=20) as client:
            assert len((await client.complete([1, 2, 3], max_tokens=4)).token_ids) == 4
        async with AsyncClient(target, retries=0) as client:
            with pytest.raises(UnavailableError):
                await client.list_models(timeout_s=5)
