"""The systems that are compared, as processes to start. All serve one model with the same engines."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twostroke.bench.load import MODEL
from twostroke.errors import ConfigError
from twostroke.free_port import free_port
from twostroke.launch import devices, plan
from twostroke.launch.devices import Devices
from twostroke.launch.processes import ProcessSpec

DIRECT, VLLM_ROUTER, TWOSTROKE = "direct", "vllm-router", "twostroke"
ONE, ROUND_ROBIN = "one", "round-robin"

VLLM_ROUTER_INSTALL = f"{sys.executable} -m pip install vllm-router==0.1.17"

_HOST = "127.0.0.1"
_MAX_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Served:
    """What every system serves."""

    model: str
    """Folder."""
    kv_bytes: int
    """Of each engine."""
    max_model_len_tokens: int
    step_budget_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Stack:
    """One system."""

    name: str
    stages: tuple[tuple[ProcessSpec, ...], ...]
    """Processes to start; each stage once the one before answers on its HTTP address."""
    address: tuple[str, int]
    """Where its clients ask."""
    routers: tuple[str, ...]
    """Processes between the clients and whatever fronts an engine."""
    front_ends: tuple[str, ...]
    """Processes that front one engine each; the engine is their descendants."""

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All of them."""
        return tuple(spec for stage in self.stages for spec in stage)


def cpu_devices(environment: Mapping[str, str]) -> Devices:
    """This machine's cores. Raises ConfigError where the engine is one for GPUs: stacks place engines on cores."""
    found = devices.detect(environment)
    if found.gpus:
        raise ConfigError(
            "this benchmark places engines on CPU cores; install the CPU engine (make install ENGINE=cpu)"
        )
    return found


def vllm_router_installed() -> bool:
    """Whether the comparison with vllm-router can be made here."""
    return importlib.util.find_spec("vllm_router") is not None


class Builder:
    """Makes the stacks, each on ports that are free and given to no other."""

    def __init__(self, served: Served, devices: Devices, environment: Mapping[str, str]) -> None:
        self._served = served
        self._devices = devices
        self._environment = {
            **environment,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "TORCHDYNAMO_DISABLE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "NIXL_LOG_LEVEL": "WARN",
            # Our workers choose it for themselves when they share a machine.
            "UCX_NET_DEVICES": environment.get("UCX_NET_DEVICES", "lo"),
        }
        self._ports: list[int] = []

    def _port(self) -> int:
        # An engine binds its ports a minute after they are chosen.
        port = free_port(_HOST, self._ports)
        self._ports.append(port)
        return port

    def direct(self, *extra: str, core: int = 1) -> Stack:
        """One vLLM API server, its engine on one core: the others prefill on 0 and decode on 1. extra: its further
        arguments."""
        server = self._api_server("direct", self._core(core), extra=extra)
        return Stack(DIRECT, ((server,),), _split(server.address), (), ("direct",))

    def one(self) -> Stack:
        """One vLLM API server with an engine on all cores."""
        server = self._api_server(ONE, self._devices.cores)
        return Stack(ONE, ((server,),), _split(server.address), (), (ONE,))

    def round_robin(self) -> Stack:
        """vllm-router, round robin, over two vLLM API servers that know nothing of each other."""
        servers = tuple(self._api_server(f"vllm-{index}", self._core(index)) for index in range(2))
        router = self._vllm_router("--worker-urls", *(f"http://{server.address}" for server in servers))
        return Stack(
            ROUND_ROBIN,
            (servers, (router,)),
            _split(router.address),
            (router.name,),
            tuple(server.name for server in servers),
        )

    def vllm_router(self) -> Stack:
        """vllm-router in its P/D mode over two vLLM API servers."""
        prefill = self._api_server("vllm-prefill", self._core(0), role="kv_producer")
        decode = self._api_server("vllm-decode", self._core(1), role="kv_consumer")
        pools = ("--prefill", f"http://{prefill.address}", "--decode", f"http://{decode.address}")
        router = self._vllm_router("--vllm-pd-disaggregation", *pools)
        return Stack(
            VLLM_ROUTER,
            ((prefill, decode), (router,)),
            _split(router.address),
            (router.name,),
            (prefill.name, decode.name),
        )

    def twostroke(self, worker_args: Sequence[str] = (), router_args: Sequence[str] = ()) -> Stack:
        """Our router, one prefill and one decode worker, as `twostroke up` starts them.

        Call it before the others: its workers' ports are chosen without knowing of theirs. worker_args, router_args:
        further flags.
        """
        http_port, grpc_port = self._port(), self._port()
        length = f"--max-model-len-tokens={self._served.max_model_len_tokens}"
        options = plan.UpOptions(
            engine="vllm",
            model=self._served.model,
            served_model_name=MODEL,
            prefill=1,
            decode=1,
            host=_HOST,
            http_port=http_port,
            grpc_port=grpc_port,
            dtype="float32",
            worker_args=(
                length,
                f"--kv-bytes={self._served.kv_bytes}",
                f"--step-budget-tokens={self._served.step_budget_tokens}",
                f"--max-sequences={_MAX_SEQUENCES}",
                "--drain-s=1",
                "--log-level=WARNING",
                *worker_args,
            ),
            router_args=(length, "--drain-s=1", "--log-level=WARNING", *router_args),
        )
        made = plan.make(options, self._devices, self._environment)
        self._ports += [int(worker.address.rpartition(":")[2]) for worker in made.workers]
        return Stack(
            TWOSTROKE,
            (made.processes,),
            (_HOST, http_port),
            (made.router.name,),
            tuple(worker.name for worker in made.workers),
        )

    def _vllm_router(self, *over: str) -> ProcessSpec:
        port = self._port()
        command = (
            *(sys.executable, "-m", "vllm_router.launch_router", "--host", _HOST, "--port", str(port)),
            *(*over, "--policy", "round_robin", "--log-level", "error"),
            *("--prometheus-port", str(self._port()), "--worker-startup-check-interval", "1"),
        )
        return ProcessSpec("vllm-router", command, f"{_HOST}:{port}", self._environment)

    def _api_server(self, name: str, cores: Sequence[int], role: str = "", extra: Sequence[str] = ()) -> ProcessSpec:
        port = self._port()
        served = self._served
        command = [
            *(
                sys.executable,
                "-m",
                "vllm.entrypoints.launchers.api_server.entry",
                "--host",
                _HOST,
                "--port",
                str(port),
            ),
            *("--model", served.model, "--served-model-name", MODEL, "--dtype", "float32", "--enforce-eager"),
            *("--max-model-len", str(served.max_model_len_tokens), "--kv-cache-memory-bytes", str(served.kv_bytes)),
            *("--max-num-batched-tokens", str(served.step_budget_tokens), "--max-num-seqs", str(_MAX_SEQUENCES)),
            *("--generation-config", "vllm", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        ]
        command += extra
        if role:
            command += ["--kv-transfer-config", json.dumps(_kv_transfer(role))]
        return ProcessSpec(name, tuple(command), f"{_HOST}:{port}", self._placed(cores))

    def _core(self, index: int) -> tuple[int]:
        cores = self._devices.cores
        return (cores[index % len(cores)],)

    def _placed(self, cores: Sequence[int]) -> dict[str, str]:
        return {
            **self._environment,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_NIXL_SIDE_CHANNEL_HOST": _HOST,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self._port()),
            **self._devices.tuned(self._environment),
        }


def _kv_transfer(role: str) -> dict[str, object]:
    # Our form of the connector, so that its progress thread takes no core away and only the routers differ.
    return {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "twostroke.engine.vllm.nixl",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"num_threads": 0},
    }


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
