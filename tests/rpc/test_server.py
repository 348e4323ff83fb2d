"""What every server does around every call, over a real socket."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from twostroke.config import RpcSettings
from twostroke.errors import (
    ConfigError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    TwostrokeError,
    UnavailableError,
)
from twostroke.rpc import interceptors
from twostroke.rpc.channel import connect
from twostroke.rpc.probe import check
from twostroke.rpc.server import Server
from twostroke.rpc.status import to_error
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc

SERVICE = "twostroke.v1.InferenceService"
GENERATE = f"/{SERVICE}/Generate"


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Fails as the request id says."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        try:
            yield pb.GenerateResponse(text="one")
            if request.request_id == "overloaded":
                raise OverloadedError("full; come back", retry_after_s=2.5)
            if request.request_id == "bug":
                raise ZeroDivisionError("oops")
            if request.request_id == "cancelled":
                raise asyncio.CancelledError
            if request.request_id in ("forever", "late"):
                await asyncio.Event().wait()
        finally:
            if request.request_id == "late":
                await asyncio.sleep(0.1)
            self.ended.set()

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        raise InvalidRequestError("no models today")


class Rig:
    def __init__(self) -> None:
        self.service = Inference()
        self.server = Server(RpcSettings(), [SERVICE], frozenset({GENERATE}))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, self.server.grpc)
        self.port = 0

    async def generate(self, request_id: str, timeout_s: float | None = 5) -> list[str]:
        async with connect(f"127.0.0.1:{self.port}", RpcSettings()) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            try:
                call = stub.Generate(pb.GenerateRequest(request_id=request_id), timeout=timeout_s)
                return [response.text async for response in call]
            except grpc.aio.AioRpcError as error:
                raise to_error(error) from error


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    rig.port = await rig.server.start("127.0.0.1", 0)
    yield rig
    await rig.server.drain(0)


@pytest.mark.parametrize(
    ("request_id", "kind", "message"),
    [
        ("overloaded", OverloadedError, "full; come back"),
        ("bug", EngineError, "ZeroDivisionError: oops"),
        ("cancelled", EngineError, "cancelled by its own server"),
    ],
)
async def test_whatever_a_handler_raises_reaches_the_client_as_its_class(
    rig: Rig, request_id: str, kind: type[TwostrokeError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        await rig.generate(request_id)


async def test_retry_delay_reaches_the_client(rig: Rig) -> None:
    with pytest.raises(OverloadedError) as caught:
        await rig.generate("overloaded")
    assert caught.value.retry_after_s == 2.5


async def test_a_unary_handler_is_mapped_too(rig: Rig) -> None:
    async with connect(f"127.0.0.1:{rig.port}", RpcSettings()) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
    assert type(to_error(caught.value)) is InvalidRequestError
    assert to_error(caught.value).message == "no models today"


async def test_a_call_without_a_deadline_is_refused_by_name(rig: Rig) -> None:
    with pytest.raises(InvalidRequestError, match="Generate needs a deadline"):
        await rig.generate("fine", timeout_s=None)
    assert await rig.generate("fine") == ["one"]


async def test_a_client_that_leaves_ends_the_handler_and_gets_no_status(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-68: of each status that finds no client, grpc.aio keeps 400 bytes for ever."""
    aborted: list[object] = []

    async def note(context: object, error: TwostrokeError) -> None:
        aborted.append(error)

    monkeypatch.setattr(interceptors, "abort", note)
    async with connect(f"127.0.0.1:{rig.port}", RpcSettings()) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(request_id="forever"), timeout=60
        )
        assert (await call.read()).text == "one"
        call.cancel()
        await asyncio.wait_for(rig.service.ended.wait(), 5)
    assert await rig.generate("fine") == ["one"]
    assert aborted == []


async def test_a_drained_server_has_no_handler_left(rig: Rig) -> None:
    """One that ends with its event loop leaves a traceback in the log."""
    async with connect(f"127.0.0.1:{rig.port}", RpcSettings()) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(
            pb.GenerateRequest(request_id="late"), timeout=60
        )
        assert (await call.read()).text == "one"
        await rig.server.drain(0)
        assert rig.service.ended.is_set()


async def test_a_dead_address_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        async with connect(f"127.0.0.1:{port}", RpcSettings()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(pb.ListModelsRequest(), timeout=5)
    error = to_error(caught.value)
    assert type(error) is UnavailableError
    assert f"127.0.0.1:{port}" in error.message


async def test_a_taken_port_names_the_flag(rig: Rig) -> None:
    second = Server(RpcSettings(), [SERVICE], frozenset())
    with pytest.raises(ConfigError, match=rf"127.0.0.1:{rig.port}.*--grpc-port"):
        await second.start("127.0.0.1", rig.port, "--grpc-port")


async def test_health_watch_streams_and_list_names_the_services(rig: Rig) -> None:
    async with connect(f"127.0.0.1:{rig.port}", RpcSettings()) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE), timeout=20)
        seen = [(await watch.read()).status]
        for ready in (True, False):
            await rig.server.set_ready(ready)
            seen.append((await watch.read()).status)
        assert seen == [2, 1, 2], "NOT_SERVING, SERVING, NOT_SERVING"
        listed = await stub.List(health_pb2.HealthListRequest(), timeout=5)
        assert listed.statuses[""].status == 1
        assert listed.statuses[SERVICE].status == 2
        watch.cancel()
    answers = [await asyncio.to_thread(check, f"127.0.0.1:{rig.port}", name) for name in ("", SERVICE, "no.such")]
    assert answers == ["SERVING", "NOT_SERVING", "NOT_FOUND"]


async def test_reflection_lists_our_services(rig: Rig) -> None:
    async with connect(f"127.0.0.1:{rig.port}", RpcSettings()) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)
        names = {service.name async for answer in call for service in answer.list_services_response.service}
    assert {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names


FROZEN = """
import asyncio
from twostroke.config import RpcSettings
from twostroke.rpc.server import Server

async def main():
    server = Server(RpcSettings(), ["twostroke.v1.InferenceService"], frozenset())
    print(await server.start("127.0.0.1", 0), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_stopped_peer_is_noticed() -> None:
    """Its kernel still acknowledges, so gRPC's keepalive alone would wait for ever."""
    settings = RpcSettings(keepalive_s=0.5, keepalive_timeout_s=0.5, ping_timeout_s=1.0)
    process = subprocess.Popen([sys.executable, "-c", FROZEN], stdout=subprocess.PIPE, env={**os.environ})
    assert process.stdout is not None
    try:
        port = int(await asyncio.to_thread(process.stdout.readline))
        async with connect(f"127.0.0.1:{port}", settings) as channel:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=""), timeout=30)
            assert (await watch.read()).status == 1
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await watch.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
