"""A router and workers on the reference engine, each a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from twostroke.config import RpcSettings
from twostroke.free_port import free_port
from twostroke.rpc.channel import connect
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from twostroke.v1.engine_pb2 import SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse

WAIT_S = 20.0


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    ports: list[int] = []
    while len(ports) < count:
        ports.append(free_port(host, ports))
    return ports


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    pieces: list[GenerateResponse] = field(default_factory=list)

    @property
    def last(self) -> GenerateResponse:
        return self.pieces[-1]


def request(prompt: Sequence[int], max_tokens: int = 16, **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        tokens=TokenSequence(token_ids=prompt),
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
    )


class ReferenceCluster:
    """Processes by name: "router", "prefill-0", "decode-0" and so on."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[str, int] = {}
        self.inside: dict[str, list[str]] = {}
        """Command prefixes of processes that run elsewhere, such as in a network namespace."""

    def start(self, name: str, *flags: str) -> None:
        """Starts one process, or the same one again."""
        module = "twostroke.router" if name.startswith("router") else "twostroke.worker"
        log = (self._folder / f"{name}.log").open("ab")
        self._processes[name] = subprocess.Popen(
            [*self.inside.get(name, ()), sys.executable, "-m", module, *flags],
            stdout=log,
            stderr=log,
            env={**os.environ},
        )
        log.close()

    def start_worker(self, name: str, *flags: str) -> None:
        role = name.split("-")[0]
        common = ("--engine", "reference", "--role", role, "--worker-id", name, "--port", str(self.ports[name]))
        self.start(name, *common, "--drain-s", "1", *flags)

    def signal(self, name: str, number: int) -> None:
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        process = self._processes.pop(name)
        process.kill()
        process.wait()

    def wait_exit(self, name: str) -> int:
        return self._processes[name].wait(WAIT_S)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def stop(self) -> None:
        for process in self._processes.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for name, process in self._processes.items():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{name} did not end within 10 s of SIGTERM:\n{self.log(name)}") from None


class Cluster(ReferenceCluster):
    """With a channel to the router."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._channel: grpc.aio.Channel | None = None

    @property
    def channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            self._channel = connect(f"127.0.0.1:{self.ports['router']}", RpcSettings())
        return self._channel

    async def view(self) -> cluster_pb2.WatchResponse:
        return await self.until(lambda _: True)

    async def until(self, condition: Callable[[cluster_pb2.WatchResponse], bool]) -> cluster_pb2.WatchResponse:
        """The first view of the cluster that the condition holds for."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self.channel)
        view = None
        try:
            call = stub.Watch(cluster_pb2.WatchRequest(), timeout=WAIT_S, wait_for_ready=True)
            async for view in call:
                if condition(view):
                    return view
        except grpc.aio.AioRpcError as error:
            raise AssertionError(f"{error.details()}; the last view was {view}") from error
        raise AssertionError("the router ended the watch")

    async def ready(self, workers: int) -> cluster_pb2.WatchResponse:
        """When so many workers and all links between them are ready."""
        state = cluster_pb2.WORKER_STATE_READY
        return await self.until(
            lambda view: (
                view.ready
                and sum(w.state == state for w in view.workers) == workers
                and all(link.state == cluster_pb2.LINK_STATE_READY for link in view.links)
            )
        )

    async def empty(self) -> cluster_pb2.WatchResponse:
        """When no worker has a request or a block in use."""
        return await self.until(
            lambda view: (
                not view.requests
                and all(
                    not w.load.used_blocks and not w.load.held_handoffs and not w.load.running_requests
                    for w in view.workers
                    if w.state == cluster_pb2.WORKER_STATE_READY
                )
            )
        )

    async def ask(self, wanted: GenerateRequest, timeout_s: float = WAIT_S) -> Answer:
        answer = Answer()
        async for piece in self.stream(wanted, timeout_s):
            answer.token_ids.extend(piece.token_ids)
            answer.pieces.append(piece)
        return answer

    async def stream(self, wanted: GenerateRequest, timeout_s: float = WAIT_S) -> AsyncIterator[GenerateResponse]:
        call = inference_pb2_grpc.InferenceServiceStub(self.channel).Generate(wanted, timeout=timeout_s)
        try:
            async for piece in call:
                yield piece
        finally:
            call.cancel()


@asynccontextmanager
async def running(
    prefill: int = 1,
    decode: int = 1,
    *,
    worker_flags: Sequence[str] = (),
    own_flags: dict[str, Sequence[str]] | None = None,
    router_flags: Sequence[str] = (),
    worker_host: str = "127.0.0.1",
    wait: bool = True,
) -> AsyncIterator[Cluster]:
    """A cluster that is ready. own_flags: further flags of single workers, by name."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(Path(folder))
        names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
        cluster.ports = dict(zip(["router", *names], free_ports(1 + len(names), worker_host), strict=True))
        bracketed = f"[{worker_host}]" if ":" in worker_host else worker_host
        addresses = ",".join(f"{bracketed}:{cluster.ports[name]}" for name in names)
        try:
            for name in names:
                cluster.start_worker(name, "--host", worker_host, *worker_flags, *(own_flags or {}).get(name, ()))
            cluster.start(
                "router",
                *("--front-end", "plain", "--grpc-port", str(cluster.ports["router"]), "--workers", addresses),
                *("--drain-s", "1", *router_flags),
            )
            if wait:
                await cluster.ready(len(names))
            yield cluster
        finally:
            if cluster._channel is not None:
                await cluster._channel.close()
            await asyncio.to_thread(cluster.stop)
