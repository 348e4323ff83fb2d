"""The real engine, once per test run: a plain vLLM API server for the truth, and two pools through `twostroke up`."""

import json
import os
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cluster.reference_cluster import free_ports
from engine.scheduler_rig import Family
from twostroke.bench.parity.row import MODEL as ROWS_MODEL
from twostroke.bench.parity.systems import KV_BYTES, Extras, router_args, systems
from twostroke.bench.stacks import Served
from twostroke.config import RpcSettings
from twostroke.launch import devices
from twostroke.rpc.channel import connect
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc

MODEL = "SmolLM2-135M-Instruct"
MAX_MODEL_LEN_TOKENS = 2048
START_S = 200.0
# By the first name tests ask for it, by the second the rows of the parity table do.
_NAMES = ("--served-model-name", MODEL, ROWS_MODEL)


@dataclass(frozen=True)
class Engines:
    """One plain engine's API server, and a cluster of one prefill and one decode worker."""

    model: str
    """Folder."""
    one: tuple[str, int]
    two: tuple[str, int]
    grpc: str


@dataclass(frozen=True)
class TwoPools:
    """A running cluster."""

    model: str
    http: str
    grpc: str


@pytest.fixture(scope="session")
def model() -> str:
    """Folder of the bundled model, converted if need be."""
    command = [sys.executable, "-m", "twostroke", "model", "fetch"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]


@pytest.fixture
def family(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Family]]:
    """Makes schedulers; see scheduler_rig.py. They make no step only to stay awake."""
    from twostroke.engine.vllm.direct import connector

    monkeypatch.setattr(connector, "AWAKE_S", 3600)
    made: list[Family] = []

    def make(*args: int, **more: bool) -> Family:
        made.append(Family(model, tmp_path, *args, **more))
        return made[-1]

    yield make
    for each in made:
        each.handoffs.close()


@contextmanager
def started(model: str, folder: Path, extras: Extras) -> Iterator[Engines]:
    """Both systems, started side by side. Their logs must hold no traceback at the end."""
    served = Served(model, KV_BYTES, MAX_MODEL_LEN_TOKENS)
    extra = replace(extras, one=(*_NAMES, *extras.one))
    spec = systems(served, devices.detect(os.environ), os.environ, extra)[0].processes[0]
    http, grpc = free_ports(2)
    environment = {**os.environ, "TWOSTROKE_RUN_DIR": str(folder / "run")}
    length = f"--max-model-len-tokens={MAX_MODEL_LEN_TOKENS}"
    workers = shlex.join([length, f"--kv-bytes={KV_BYTES}", *extras.worker])
    router = shlex.join([length, *router_args(extras, *_NAMES)])
    ports = ("--http-port", str(http), "--grpc-port", str(grpc))
    command = [sys.executable, "-m", "twostroke"]
    up = [*command, "up", "--detach", "--no-ask", "--dtype", "float32", *ports]
    with (folder / "one.log").open("wb") as log:
        one = subprocess.Popen(spec.command, env=dict(spec.environment), stdout=log, stderr=log)
    try:
        done = subprocess.run(
            [*up, "--worker-args", workers, "--router-args", router],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        host, _, port = spec.address.rpartition(":")
        _until_healthy(f"http://{spec.address}/health", one, folder / "one.log")
        yield Engines(model, (host, int(port)), ("127.0.0.1", http), f"127.0.0.1:{grpc}")
    finally:
        one.terminate()
        down = subprocess.run([*command, "down"], env=environment, capture_output=True, text=True, check=False)
        try:
            one.wait(30)
        except subprocess.TimeoutExpired:  # it may hang where it was still starting
            one.kill()
            one.wait()
        assert down.returncode == 0, down.stdout + down.stderr
    for log in (folder / "run").glob("*.log"):
        assert "Traceback" not in log.read_text(), f"{log.name}:\n{log.read_text()[-5000:]}"


def _until_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < deadline_s:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except OSError:
            time.sleep(0.3)
    raise AssertionError(log.read_text()[-3000:])


@pytest.fixture(scope="session")
def engines(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    """Both systems, for all tests of them."""
    with started(model, tmp_path_factory.mktemp("engines"), Extras()) as engines:
        yield engines


@pytest.fixture(scope="session")
def two_pools(engines: Engines) -> TwoPools:
    """The cluster of the two: one router, one prefill worker, one decode worker, each worker on its own core."""
    return TwoPools(MODEL, f"http://{engines.two[0]}:{engines.two[1]}", engines.grpc)


async def watch(
    grpc: str, condition: Callable[[cluster_pb2.WatchResponse], object], timeout_s: float = 60
) -> cluster_pb2.WatchResponse:
    """The first view of the cluster that the condition holds for."""
    view = None
    async with connect(grpc, RpcSettings()) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        async for view in stub.Watch(cluster_pb2.WatchRequest(), timeout=timeout_s):
            if condition(view):
                return view
    raise AssertionError(f"the watch ended with {view}")


async def served(grpc: str) -> dict[str, set[str]]:
    """By request that the router knows: the workers that computed its prompt or wrote its tokens."""
    async with connect(grpc, RpcSettings()) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        listed = await stub.ListRequests(cluster_pb2.ListRequestsRequest(), timeout=60)
    return {
        view.request_id: {view.timeline.prefill_worker_id, view.timeline.decode_worker_id} - {""}
        for view in listed.requests
    }


def body_of(text: bytes) -> object:
    """JSON, or the text where it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text.decode(errors="replace")
