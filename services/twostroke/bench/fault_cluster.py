"""Routers and workers on the reference engine, with a proxy before every worker, to be broken on purpose."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from twostroke.bench.fault_proxy import FaultProxy
from twostroke.config import RpcSettings, child_environment
from twostroke.errors import UnavailableError
from twostroke.free_port import free_port
from twostroke.launch.processes import ProcessSpec, Watched, start, take_down
from twostroke.rpc.channel import connect
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from twostroke.v1.inference_pb2 import GenerateRequest

READY_TIMEOUT_S = 60.0
# A client whose router is stopped, but not dead, has nothing else to find that out by.
CLIENT = RpcSettings(keepalive_s=0.5, keepalive_timeout_s=0.5, ping_timeout_s=0.5, connect_timeout_s=0.5)
OVER = (cluster_pb2.REQUEST_STATE_FINISHED, cluster_pb2.REQUEST_STATE_FAILED)
_HOST = "127.0.0.1"
_GRACE_S = 10.0


@dataclass(slots=True)
class FaultCluster:
    """The processes by name, such as "router-1" and "decode-3"."""

    logs: Path
    specs: dict[str, ProcessSpec] = field(default_factory=dict)
    running: dict[str, Watched] = field(default_factory=dict)
    proxies: dict[str, FaultProxy] = field(default_factory=dict)
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    starts: Counter[str] = field(default_factory=Counter)

    @property
    def routers(self) -> list[str]:
        """Names of the routers."""
        return [name for name in self.specs if name.startswith("router")]

    @property
    def workers(self) -> list[str]:
        """Names of the workers."""
        return list(self.proxies)

    def start(self, name: str) -> None:
        """Starts a process, or the same one again."""
        self.starts[name] += 1
        self.running[name] = start(self.specs[name], self.logs / f"{name}.{self.starts[name]}.log")

    async def kill(self, name: str) -> None:
        """Kills a process; it is gone on return."""
        self.signal(name, signal.SIGKILL)
        await self.running.pop(name).ended

    def signal(self, name: str, number: int) -> None:
        """Sends a process a signal."""
        os.kill(self.running[name].pid, number)

    def generate(self, router: str, request: GenerateRequest, timeout_s: float) -> Any:
        """A call of a router's API, to iterate over."""
        return inference_pb2_grpc.InferenceServiceStub(self.channels[router]).Generate(request, timeout=timeout_s)

    async def unfinished(self, router: str) -> list[cluster_pb2.RequestView]:
        """Requests that a router has not brought to an end."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self.channels[router])
        listed = await stub.ListRequests(cluster_pb2.ListRequestsRequest(limit=1000), timeout=5.0)
        return [request for request in listed.requests if request.state not in OVER]

    async def view(self, router: str) -> cluster_pb2.WatchResponse:
        """A router's view of the cluster now."""
        stub = cluster_pb2_grpc.ClusterServiceStub(self.channels[router])
        call = stub.Watch(cluster_pb2.WatchRequest(once=True), timeout=5.0, wait_for_ready=True)
        async for view in call:
            found: cluster_pb2.WatchResponse = view
            return found
        raise UnavailableError(f"{router} shows nothing")

    async def ready(self) -> None:
        """Waits until every router has all workers and links ready. Raises UnavailableError after READY_TIMEOUT_S."""
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                # What is waited for is in other processes.
                while not all([await self._is_ready(router) for router in self.routers]):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise UnavailableError(
                f"the cluster is not ready after {READY_TIMEOUT_S:.0f} s; logs: {self.logs}"
            ) from None

    async def _is_ready(self, router: str) -> bool:
        try:
            view = await self.view(router)
        except grpc.aio.AioRpcError:
            return False
        ready = cluster_pb2.WORKER_STATE_READY
        return sum(worker.state == ready for worker in view.workers) == len(self.workers) and all(
            link.state == cluster_pb2.LINK_STATE_READY for link in view.links
        )


@asynccontextmanager
async def fault_cluster(
    prefill: int, decode: int, routers: int, logs: Path, worker_flags: Sequence[str], router_flags: Sequence[str]
) -> AsyncIterator[FaultCluster]:
    """A cluster that is ready. Everything is gone afterwards."""
    cluster = FaultCluster(logs)
    names = [f"prefill-{i}" for i in range(prefill)] + [f"decode-{i}" for i in range(decode)]
    ports: list[int] = []
    async with AsyncExitStack() as stack:
        try:
            for name in names:
                ports.append(free_port(_HOST, ports))
                address = f"{_HOST}:{ports[-1]}"
                command: tuple[str, ...] = (sys.executable, "-m", "twostroke.worker", "--engine=reference")
                command += (
                    f"--worker-id={name}",
                    f"--role={name.partition('-')[0]}",
                    f"--port={ports[-1]}",
                    "--drain-s=1",
                    *worker_flags,
                )
                cluster.specs[name] = ProcessSpec(name, command, address, child_environment())
                cluster.proxies[name] = await stack.enter_async_context(FaultProxy(address))
                cluster.start(name)
            behind = ",".join(proxy.address for proxy in cluster.proxies.values())
            for index in range(routers):
                ports.append(free_port(_HOST, ports))
                name, address = f"router-{index}", f"{_HOST}:{ports[-1]}"
                command = (sys.executable, "-m", "twostroke.router", "--front-end=plain", f"--grpc-port={ports[-1]}")
                command += (f"--workers={behind}", f"--router-id={name}", "--drain-s=1", *router_flags)
                cluster.specs[name] = ProcessSpec(name, command, address, child_environment())
                cluster.channels[name] = await stack.enter_async_context(connect(address, CLIENT))
                cluster.start(name)
            await cluster.ready()
            yield cluster
        finally:
            for process in cluster.running.values():
                if not process.ended.done():
                    os.kill(process.pid, signal.SIGCONT)
            await take_down(list(cluster.running.values()), _GRACE_S)
