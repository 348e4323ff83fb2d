"""The containers of compose.yaml: built, started, disturbed, asked."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from cluster.reference_cluster import free_ports
from twostroke.client import AsyncClient
from twostroke.config import RpcSettings
from twostroke.engine.reference_model import expected_tokens
from twostroke.rpc.channel import connect
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc
from twostroke.v1.engine_pb2 import SamplingParams

ROOT = Path(__file__).parents[2]
PROJECT = "twostroke-test"
LOCAL_BASE = "twostroke-base:local"
WANTED_BASE = "python:3.11-slim-bookworm"
KEY = "key-of-the-compose-test-5519"
UP_S = {"reference": 100.0, "cpu": 400.0}
"""Longest start of a worker or of all; real engines share few cores."""
ANSWER_S = {"reference": 60.0, "cpu": 240.0}
TOKENS = {"reference": 60, "cpu": 24}
SCALE = {"reference": (2, 3), "cpu": (2, 2)}
"""Prefill and decode workers, once scaled up."""

DOCKER = os.environ.get("DOCKER", "docker")


def run(*command: str, check: bool = True, timeout_s: float = 900, **environment: str) -> str:
    """What a command prints. Fails with all of it when the command does."""
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, env={**os.environ, **environment}
    )
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def docker(*arguments: str, check: bool = True) -> str:
    return run(DOCKER, *arguments, check=check).strip()


def missing() -> str:
    """Why there can be no containers here; empty when there can."""
    if not os.environ.get("COMPOSE_TARGET"):
        return "containers are tested by `make test-compose`"
    if shutil.which(DOCKER) is None or subprocess.run([DOCKER, "info"], capture_output=True).returncode:
        return f"no Docker daemon answers `{DOCKER} info`"
    return ""


def compose_command() -> list[str]:
    """The plugin, or the older program of its own."""
    plugin = subprocess.run([DOCKER, "compose", "version"], capture_output=True).returncode == 0
    return [DOCKER, "compose"] if plugin else ["docker-compose"]


def build(target: str) -> str:
    """Builds the image of a target; returns its name."""
    base = WANTED_BASE
    if not docker("image", "ls", "-q", base):
        pulled = subprocess.run([DOCKER, "pull", "-q", base], capture_output=True, timeout=120)
        if pulled.returncode:
            base = LOCAL_BASE
            run("docker/local_base.sh", base, DOCKER=DOCKER)
    for path in Path("/usr/local/share/ca-certificates").glob("*.crt"):
        shutil.copy(path, ROOT / "docker" / "certificates")
    # Where pip here takes PyTorch for the CPU from a folder, the build does, too.
    for folder in os.environ.get("PIP_FIND_LINKS", "").split():
        for path in Path(folder).glob("torch-*+cpu-*.whl"):
            if not (ROOT / "docker" / "wheels" / path.name).exists():
                shutil.copy(path, ROOT / "docker" / "wheels")
    image = f"twostroke:{target}"
    argument = f"BASE_IMAGE={base}"
    run(DOCKER, "build", "--target", target, "-t", image, "--build-arg", argument, ".",
        DOCKER_BUILDKIT="1", timeout_s=3000)  # fmt: skip
    return image


@dataclass
class Stack:
    """A running stack. Containers are named as compose knows them: "decode", and a number from 1."""

    target: str
    environment: dict[str, str]
    compose: list[str] = field(default_factory=compose_command)
    started_s: float = 0.0
    """Seconds from the command to the router's readiness."""
    known: dict[tuple[tuple[int, ...], int], list[int]] = field(default_factory=dict)

    @property
    def scale(self) -> tuple[int, int]:
        return SCALE[self.target]

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.environment['GRPC_PORT']}"

    def client(self, *, key: str | None = KEY, timeout_s: float = 60) -> AsyncClient:
        return AsyncClient(self.grpc, api_key=key, timeout_s=timeout_s, retries=0)

    def call(self, *arguments: str) -> str:
        files = ("-f", "compose.yaml", "-f", "docker/compose.test.yaml")
        return run(*self.compose, "-p", PROJECT, *files, *arguments, **self.environment)

    def up(self, *, prefill: int, decode: int) -> None:
        scale = ("--scale", f"prefill={prefill}", "--scale", f"decode={decode}")
        self.call("up", "-d", "--no-build", *scale)

    def containers(self, service: str) -> list[str]:
        """Names of a service's containers, stopped ones too."""
        label = (f"label=com.docker.compose.project={PROJECT}", f"label=com.docker.compose.service={service}")
        listed = docker("ps", "-a", "--filter", label[0], "--filter", label[1], "--format", "{{.Names}}")
        return sorted(listed.split())

    async def healthy(self, name: str) -> None:
        """When Docker's own probe of a container says so."""
        async with asyncio.timeout(UP_S[self.target]):
            while docker("inspect", "-f", "{{.State.Health.Status}}", name) != "healthy":  # noqa: ASYNC110
                await asyncio.sleep(0.5)

    async def until(
        self, condition: Callable[[cluster_pb2.WatchResponse], bool], timeout_s: float = 60
    ) -> cluster_pb2.WatchResponse:
        """The first view of the cluster that the condition holds for."""
        view, end_s = None, time.monotonic() + timeout_s
        async with connect(self.grpc, RpcSettings()) as channel:
            stub = cluster_pb2_grpc.ClusterServiceStub(channel)
            while (left_s := end_s - time.monotonic()) > 0:
                metadata = (("authorization", f"Bearer {KEY}"),)
                call = stub.Watch(cluster_pb2.WatchRequest(), timeout=left_s, wait_for_ready=True, metadata=metadata)
                try:
                    async for view in call:
                        if condition(view):
                            return view
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise AssertionError(f"{error.details()}; the last view was {view}") from error
        raise AssertionError(f"the last view was {view}")

    async def ready(self, prefill: int, decode: int) -> cluster_pb2.WatchResponse:
        """When exactly so many workers are ready, and all links between them."""

        def is_ready(view: cluster_pb2.WatchResponse) -> bool:
            names = [w.info.worker_id for w in view.workers if w.state == cluster_pb2.WORKER_STATE_READY]
            counts = [sum(name.startswith(role) for name in names) for role in ("prefill-", "decode-")]
            links = [link for link in view.links if link.state == cluster_pb2.LINK_STATE_READY]
            return view.ready and counts == [prefill, decode] and len(links) == prefill * decode

        return await self.until(is_ready, UP_S[self.target])

    async def ask(self, prompt: Sequence[int], count: int) -> list[int]:
        async with self.client(timeout_s=ANSWER_S[self.target]) as client:
            answer = await client.complete(prompt, max_tokens=count, temperature=0.0, ignore_eos=True)
            return list(answer.token_ids)

    async def expected(self, prompt: Sequence[int], count: int) -> list[int]:
        """The answer as it must be: known beforehand, or that of an undisturbed stack."""
        if self.target == "reference":
            return expected_tokens(list(prompt), SamplingParams(temperature=0, ignore_eos=True), count)
        key = (tuple(prompt), count)
        if key not in self.known:
            self.known[key] = await self.ask(prompt, count)
        return self.known[key]


@asynccontextmanager
async def running(target: str) -> AsyncIterator[Stack]:
    """A built and started stack, one worker of each kind, taken down whatever happens."""
    http, grpc_port, jaeger = free_ports(3)
    environment = {
        "IMAGE": await asyncio.to_thread(build, target),
        "HTTP_PORT": str(http),
        "GRPC_PORT": str(grpc_port),
        "JAEGER_PORT": str(jaeger),
        "API_KEYS": KEY,
        # What a container may ask for where the host itself has limits.
        "MEMLOCK": _limit("RLIMIT_MEMLOCK", -1),
        "NOFILE": _limit("RLIMIT_NOFILE", 65536),
    }
    if target == "reference":
        environment |= {"ENGINE": "reference", "FRONT_END": "plain"}
    stack = Stack(target, environment)
    try:
        begun_s = time.monotonic()
        await asyncio.to_thread(stack.up, prefill=1, decode=1)
        await stack.ready(1, 1)
        stack.started_s = time.monotonic() - begun_s
        yield stack
    finally:
        if folder := os.environ.get("COMPOSE_LOGS"):
            (Path(folder) / "compose.log").write_text(stack.call("logs", "--no-color"))
        stack.call("down", "-v", "--timeout", "5")


def _limit(name: str, wanted: int) -> str:
    import resource

    hard = resource.getrlimit(getattr(resource, name))[1]
    return str(wanted if hard == resource.RLIM_INFINITY else min(hard, wanted) if wanted > 0 else hard)
