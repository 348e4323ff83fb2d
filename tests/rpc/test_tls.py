"""TLS and mutual TLS of gRPC, with the certificates that `twostroke certs` makes."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.config import RpcSettings
from twostroke.errors import ConfigError
from twostroke.launch.certs import SERVER_NAME, make
from twostroke.rpc.channel import connect
from twostroke.rpc.server import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("certs")
    make(made, ["router.example"], 1)
    return made


def holder(folder: Path, name: str, **more: Any) -> RpcSettings:
    files = {"tls_ca": "ca.pem", "tls_cert": f"{name}.pem", "tls_key": f"{name}-key.pem"}
    return RpcSettings(**{key: str(folder / file) for key, file in files.items()}, **more)


@asynccontextmanager
async def serving(settings: RpcSettings) -> AsyncIterator[int]:
    server = Server(settings, (), frozenset())
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.drain(0)


async def health(port: int, settings: RpcSettings) -> str:
    async with connect(f"127.0.0.1:{port}", settings) as channel:
        try:
            response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code().name
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


async def test_both_sides_know_each_other(folder: Path) -> None:
    async with serving(holder(folder, "worker")) as port:
        assert await health(port, holder(folder, "router")) == "SERVING"
        assert await health(port, holder(folder, "client", tls_server_name=SERVER_NAME)) == "SERVING"


async def test_who_has_no_certificate_or_one_of_another_ca_is_not_let_in(folder: Path, tmp_path: Path) -> None:
    make(tmp_path, [], 1)
    async with serving(holder(folder, "worker")) as port:
        assert await health(port, RpcSettings()) == "UNAVAILABLE"
        assert await health(port, RpcSettings(tls_ca=str(folder / "ca.pem"))) == "UNAVAILABLE"
        stranger = holder(tmp_path, "router").model_copy(update={"tls_ca": str(folder / "ca.pem")})
        assert await health(port, stranger) == "UNAVAILABLE"


async def test_a_server_may_take_clients_without_certificates(folder: Path) -> None:
    async with serving(holder(folder, "router", tls_verify_clients=False)) as port:
        assert await health(port, RpcSettings(tls_ca=str(folder / "ca.pem"))) == "SERVING"


async def test_a_server_of_another_name_or_ca_is_not_spoken_to(folder: Path, tmp_path: Path) -> None:
    make(tmp_path, [], 1)
    async with serving(holder(folder, "router", tls_verify_clients=False)) as port:
        trusting = RpcSettings(tls_ca=str(folder / "ca.pem"), tls_server_name="other.example")
        assert await health(port, trusting) == "UNAVAILABLE"
        assert await health(port, trusting.model_copy(update={"tls_server_name": "router.example"})) == "SERVING"
        assert await health(port, RpcSettings(tls_ca=str(tmp_path / "ca.pem"))) == "UNAVAILABLE"


async def test_files_that_are_not_there_are_named_by_their_flag(folder: Path) -> None:
    missing = RpcSettings(tls_ca=str(folder / "none.pem"))
    with pytest.raises(ConfigError, match=r"--rpc-tls-ca .*none\.pem: No such file"):
        connect("127.0.0.1:1", missing)
    with pytest.raises(ConfigError, match="--rpc-tls-cert needs --rpc-tls-key"):
        await Server(RpcSettings(tls_cert=str(folder / "ca.pem")), (), frozenset()).start("127.0.0.1", 0)


def test_keys_are_their_owners_and_a_renewal_keeps_the_ca(folder: Path) -> None:
    before = (folder / "ca.pem").read_bytes()
    written = make(folder, ["router.example"], 1)
    assert [path.name for path in written] == ["router.pem", "worker.pem", "client.pem"]
    assert (folder / "ca.pem").read_bytes() == before
    for key in folder.glob("*-key.pem"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600


def test_half_a_ca_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_bytes((folder / "ca.pem").read_bytes())
    with pytest.raises(ConfigError, match=r"only one of ca\.pem and ca-key\.pem"):
        make(tmp_path, [], 1)
