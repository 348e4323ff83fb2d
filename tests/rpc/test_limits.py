"""What a server and its clients bear: large messages, pings, cancelled handlers, idle connections, child processes."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from twostroke.config import RpcSettings
from twostroke.errors import EngineError, InvalidRequestError
from twostroke.rpc.channel import connect
from twostroke.rpc.server import Server
from twostroke.rpc.status import to_error
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc
from twostroke.v1.engine_pb2 import TokenSequence

SERVICES = Path(__file__).parents[2] / "services" / "twostroke"


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Does as the request id says."""

    def __init__(self) -> None:
        self.running = 0
        self.peers: set[str] = set()
        self.go_on = asyncio.Event()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        self.running += 1
        self.peers.add(context.peer())
        try:
            yield pb.GenerateResponse(text=str(len(request.tokens.token_ids)))
            if request.request_id == "quiet":
                await self.go_on.wait()
                yield pb.GenerateResponse(text="after")
            if request.request_id == "cancelled within":
                inner = asyncio.create_task(asyncio.Event().wait())
                asyncio.get_running_loop().call_soon(inner.cancel)
                await inner
            if request.request_id == "long answer":
                yield pb.GenerateResponse(text="x" * (6 << 20))
        finally:
            self.running -= 1


class Rig:
    def __init__(self, settings: RpcSettings) -> None:
        self.settings = settings
        self.service = Inference()
        self.server = Server(settings, ["twostroke.v1.InferenceService"], frozenset())
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, self.server.grpc)

    async def __aenter__(self) -> Rig:
        self.channel = connect(f"127.0.0.1:{await self.server.start('127.0.0.1', 0)}", self.settings)
        self.stub = inference_pb2_grpc.InferenceServiceStub(self.channel)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.server.drain(0)

    async def ask(self, request_id: str = "", tokens: int = 0, timeout_s: float | None = 20) -> list[str]:
        request = pb.GenerateRequest(request_id=request_id, tokens=TokenSequence(token_ids=range(tokens)))
        try:
            return [piece.text async for piece in self.stub.Generate(request, timeout=timeout_s)]
        except grpc.aio.AioRpcError as error:
            raise to_error(error) from error


async def test_messages_over_four_mebibytes_pass_both_ways() -> None:
    """O-72: 1.5 million token ids there, six MiB back."""
    async with Rig(RpcSettings()) as rig:
        assert await rig.ask(tokens=1_500_000) == ["1500000"]
        answer = await rig.ask("long answer")
        assert len(answer[1]) == 6 << 20


@pytest.mark.parametrize(("request_id", "tokens"), [("", 1_000_000), ("long answer", 1)])
async def test_a_message_beyond_the_limit_is_a_clear_mistake_and_not_an_overload(request_id: str, tokens: int) -> None:
    """O-72: one setting for both sides; nobody is told to come back later with the same message."""
    async with Rig(RpcSettings(max_message_bytes=1 << 20)) as rig:
        with pytest.raises(InvalidRequestError, match="--rpc-max-message-bytes") as caught:
            await rig.ask(request_id, tokens)
        assert caught.value.retry_after_s is None
        assert await rig.ask(tokens=5) == ["5"], "the connection is not touched"


async def test_pings_during_quiet_calls_close_no_connection() -> None:
    """O-66: a ping a second while nothing is said; a server with gRPC's own settings hangs up at the fourth."""
    async with Rig(RpcSettings(keepalive_s=0.1, keepalive_timeout_s=5)) as rig:
        calls = [asyncio.create_task(rig.ask("quiet")) for _ in range(6)]
        while rig.service.running < 6:  # noqa: ASYNC110 the calls are on their way
            await asyncio.sleep(0.01)
        # The silence is what is tested.
        await asyncio.sleep(5)
        rig.service.go_on.set()
        assert await asyncio.gather(*calls) == [["0", "after"]] * 6
        assert len(rig.service.peers) == 1


async def test_a_connection_that_was_idle_serves_the_next_call() -> None:
    """O-91: neither end closes idle connections, and pings keep them known to what is in between."""
    async with Rig(RpcSettings(keepalive_s=0.1)) as rig:
        for _ in range(3):
            assert await rig.ask(tokens=2) == ["2"]
            await asyncio.sleep(0.5)
        assert len(rig.service.peers) == 1


async def test_a_handler_that_is_cancelled_from_within_ends_its_call() -> None:
    """O-67: the client has no deadline and gets a status at once."""
    async with Rig(RpcSettings()) as rig:
        with pytest.raises(EngineError, match="cancelled by its own server"):
            await asyncio.wait_for(rig.ask("cancelled within", timeout_s=None), 5)


async def test_cancelled_streams_block_no_later_call() -> None:
    """O-69: twenty streams that are cancelled while the handler waits, then one normal call."""
    async with Rig(RpcSettings()) as rig:
        calls = [asyncio.create_task(rig.ask("quiet")) for _ in range(20)]
        while rig.service.running < 20:  # noqa: ASYNC110 the calls are on their way
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert await asyncio.wait_for(rig.ask(tokens=1), 5) == ["1"]
        async with asyncio.timeout(5):
            while rig.service.running:  # noqa: ASYNC110 the cancellations are on their way
                await asyncio.sleep(0.01)


def test_nothing_forks_but_the_launch_of_vllm_before_any_channel_is_there() -> None:
    """O-70: a process that forks with a channel open dead-locks its child."""
    forking = set()
    for path in SERVICES.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            named = isinstance(node, ast.Attribute) and node.attr in ("fork", "forkpty")
            if named or (isinstance(node, ast.Constant) and node.value in ("fork", "forkserver")):
                forking.add(str(path.relative_to(SERVICES)))
    assert forking <= {"engine/vllm/launch.py"}


async def test_a_child_started_after_a_channel_was_made_hinders_nobody() -> None:
    """O-70: as everything here starts processes."""
    async with Rig(RpcSettings()) as rig:
        assert await rig.ask(tokens=1) == ["1"]
        code = "import asyncio, grpc.aio; asyncio.run(grpc.aio.insecure_channel('localhost:1').close()); print('made')"
        child = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-c", code], capture_output=True, text=True, timeout=30
        )
        assert child.stdout == "made\n"
        assert await rig.ask(tokens=2) == ["2"]
