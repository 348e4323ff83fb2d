"""Does a router stay as it is under what clients do to it? `python -m twostroke.bench.limits`; writes
build/bench/limits.json.

Streams that are cancelled after their first message, a hundred thousand of them, while the router's memory is watched;
then ten thousand connections on which nothing is said, while one client asks. Workers run the reference engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import psutil
import typer

from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.fault_cluster import FaultCluster, fault_cluster
from twostroke.bench.record import Record
from twostroke.bench.running import Say
from twostroke.v1 import inference_pb2_grpc
from twostroke.v1.engine_pb2 import SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import GenerateRequest

ROUTER = "router-0"
PARTS = 10
WARM_UP_STREAMS = 3000
"""The router remembers its last thousand requests; allocators settle."""
MOST_BYTES_PER_STREAM = 100.0
MOST_ANSWER_S = 1.0
TIMEOUT_S = 30.0
OPENED_AT_ONCE = 100
# Two rounds of the server's pings, which a client that has gone does not answer.
IDLE_S = 25.0

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_HEAD_BYTES = 9
_SETTINGS, _PING, _ACK = 4, 6, 1

app = make_app()


def question(number: int, max_tokens: int) -> GenerateRequest:
    """A short prompt of its own, answered greedily."""
    tokens = TokenSequence(token_ids=[(number * 7919 + i * 104729) % 40_000 for i in range(20)])
    return GenerateRequest(tokens=tokens, sampling=SamplingParams(temperature=0, max_tokens=max_tokens))


async def cancel_streams(stub: Any, count: int, at_once: int, first: int = 0) -> None:
    """So many streams, each cancelled by its client after its first message. stub: of InferenceService."""
    numbers = iter(range(first, first + count))

    async def client() -> None:
        for number in numbers:
            call = stub.Generate(question(number, 1000), timeout=TIMEOUT_S)
            await call.read()
            call.cancel()

    async with asyncio.TaskGroup() as group:
        for _ in range(at_once):
            group.create_task(client())


class IdleConnection(asyncio.Protocol):
    """A client's end of an HTTP/2 connection on which it asks nothing; it answers pings."""

    def __init__(self) -> None:
        self.greeted = asyncio.get_running_loop().create_future()
        self._transport: asyncio.Transport | None = None
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(_PREFACE + _frame(_SETTINGS, 0, b""))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        received = self._received + data
        while len(received) >= _FRAME_HEAD_BYTES:
            size = _FRAME_HEAD_BYTES + int.from_bytes(received[:3], "big")
            if len(received) < size:
                break
            kind, flags, payload = received[3], received[4], received[_FRAME_HEAD_BYTES:size]
            received = received[size:]
            if kind in (_SETTINGS, _PING) and not flags & _ACK and self._transport is not None:
                self._transport.write(_frame(kind, _ACK, payload if kind == _PING else b""))
            if kind == _SETTINGS and not self.greeted.done():
                self.greeted.set_result(None)
        self._received = received

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._transport = None
        if not self.greeted.done():
            self.greeted.set_exception(exc or ConnectionResetError("closed before it was greeted"))
            self.greeted.exception()

    @property
    def is_open(self) -> bool:
        """Whether the server has it still."""
        return self._transport is not None

    def close(self) -> None:
        """Closes it."""
        if self._transport is not None:
            self._transport.close()


def _frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + bytes(4) + payload


@asynccontextmanager
async def idle_connections(host: str, port: int, count: int) -> AsyncIterator[list[IdleConnection]]:
    """So many connections that the server has greeted; closed afterwards."""
    loop = asyncio.get_running_loop()
    opened: list[IdleConnection] = []
    try:
        while len(opened) < count:
            some = min(OPENED_AT_ONCE, count - len(opened))
            made = await asyncio.gather(*(loop.create_connection(IdleConnection, host, port) for _ in range(some)))
            opened += [connection for _, connection in made]
            await asyncio.gather(*(connection.greeted for _, connection in made))
        yield opened
    finally:
        for connection in opened:
            connection.close()


async def _cancelled(cluster: FaultCluster, streams: int, at_once: int, record: Record, say: Say) -> None:
    """Memory over cancelled streams."""
    router = psutil.Process(cluster.running[ROUTER].pid)
    stub = _stub(cluster)
    await cancel_streams(stub, WARM_UP_STREAMS, at_once)
    began_bytes, began_s = router.memory_info().rss, time.monotonic()
    for part in range(PARTS):
        await cancel_streams(stub, streams // PARTS, at_once, WARM_UP_STREAMS + part * streams // PARTS)
        done = (part + 1) * (streams // PARTS)
        rss = router.memory_info().rss
        record.row(
            what="cancelled streams",
            count=done,
            router_rss_mib=rss / 2**20,
            growth_bytes_each=(rss - began_bytes) / done,
            seconds=time.monotonic() - began_s,
        )
        say(f"{done} streams cancelled: router has {rss / 2**20:.1f} MiB, began with {began_bytes / 2**20:.1f}")
    each = (router.memory_info().rss - began_bytes) / streams
    name = f"router memory per cancelled stream, over {streams:,}"
    record.check(name, each, "bytes", f"at most {MOST_BYTES_PER_STREAM:g}", each <= MOST_BYTES_PER_STREAM)
    async with asyncio.timeout(TIMEOUT_S):
        while any(_busy(worker.load) for worker in (await cluster.view(ROUTER)).workers):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    record.check("KV blocks in use afterwards, on all workers", 0, "blocks", "0", ok=True)


def _busy(load: Any) -> bool:
    return bool(load.used_blocks or load.held_handoffs or load.running_requests)


async def _idle(cluster: FaultCluster, connections: int, record: Record, say: Say) -> None:
    """Answers beside idle connections."""
    router = psutil.Process(cluster.running[ROUTER].pid)
    before_bytes, before_files = router.memory_info().rss, router.num_fds()
    host, _, port = cluster.specs[ROUTER].address.rpartition(":")
    began_s = time.monotonic()
    async with idle_connections(host, int(port), connections) as opened:
        opened_s = time.monotonic() - began_s
        say(f"{connections} connections are open after {opened_s:.1f} s; now idle for {IDLE_S:g} s")
        await asyncio.sleep(IDLE_S)
        took_s = await _answer(cluster)
        left = sum(connection.is_open for connection in opened)
        each_bytes = (router.memory_info().rss - before_bytes) / connections
    async with asyncio.timeout(TIMEOUT_S):
        while router.num_fds() > before_files + 10:  # noqa: ASYNC110 another process closes them
            await asyncio.sleep(0.1)
    record.row(what="idle connections", count=left, growth_bytes_each=each_bytes, seconds=opened_s)
    record.check("idle connections that live", left, "", f"{connections}", left == connections)
    record.check("an answer beside them", took_s, "s", f"within {MOST_ANSWER_S:g}", took_s <= MOST_ANSWER_S)


async def _answer(cluster: FaultCluster) -> float:
    """Seconds that a short answer took."""
    began_s = time.monotonic()
    pieces = [piece async for piece in cluster.generate(ROUTER, question(1, 8), TIMEOUT_S)]
    assert sum(len(piece.token_ids) for piece in pieces) == 8
    return time.monotonic() - began_s


def _stub(cluster: FaultCluster) -> inference_pb2_grpc.InferenceServiceStub:
    return inference_pb2_grpc.InferenceServiceStub(cluster.channels[ROUTER])


async def _measure(streams: int, at_once: int, connections: int) -> None:
    console = make_console()
    say = make_say(console)
    record = Record("limits", command_line("limits"))
    async with fault_cluster(1, 1, 1, log_folder("limits"), (), ()) as cluster:
        if connections:
            await _idle(cluster, connections, record, say)
        if streams:
            await _cancelled(cluster, streams, at_once, record, say)
    finish(record, console)


@app.command(help=__doc__)
def main(
    streams: Annotated[int, typer.Option(min=0, help="Streams to cancel; 0 for none.")] = 100_000,
    at_once: Annotated[int, typer.Option(min=1, help="Streams at a time.")] = 32,
    connections: Annotated[int, typer.Option(min=0, help="Idle connections; 0 for none.")] = 10_000,
) -> None:
    """See the module."""
    end("limits", _measure(streams, at_once, connections))


if __name__ == "__main__":
    app()
