"""What `up` will start: the command, address and environment of every process, decided before any of them runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from twostroke.config import EngineKind, RouterSettings, WorkerSettings
from twostroke.errors import ConfigError
from twostroke.flags import read
from twostroke.launch.devices import Devices
from twostroke.launch.ports import pick_free
from twostroke.launch.processes import ProcessSpec

S = TypeVar("S", RouterSettings, WorkerSettings)

_GPU_MEMORY_FRACTION = 0.9


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What the user asked `up` for."""

    engine: EngineKind
    model: str
    """Folder or hub name, already obtained; empty with the reference engine."""
    served_model_name: str
    """Empty for the folder's or the hub's name."""
    prefill: int
    """Prefill workers."""
    decode: int
    """Decode workers."""
    host: str
    http_port: int
    grpc_port: int
    dtype: str
    """Empty chooses what is right and fast here."""
    cores_per_worker: int = 1
    worker_args: tuple[str, ...] = ()
    router_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """The processes, and where the router will listen."""

    router: ProcessSpec
    workers: tuple[ProcessSpec, ...]
    grpc: str
    """host:port."""
    http: str
    """Base URL; empty when the router serves no HTTP."""
    model: str
    """Name by which clients ask for the model."""

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        """All of them, in the order of starting."""
        return (self.router, *self.workers)


def make(options: UpOptions, devices: Devices, environment: Mapping[str, str]) -> Plan:
    """The plan, with free ports where the options leave them open.

    Raises ConfigError for options that cannot work, named by their flag.
    """
    if options.prefill < 1 or options.decode < 1:
        raise ConfigError("--prefill and --decode must be at least 1: each stroke needs a worker")
    names = [f"prefill-{i}" for i in range(options.prefill)] + [f"decode-{i}" for i in range(options.decode)]
    grpc_port = options.grpc_port or pick_free(options.host, 1)[0]
    http_port = options.http_port or pick_free(options.host, 1, (grpc_port,))[0]
    ports = pick_free(options.host, len(names), (grpc_port, http_port))
    workers = tuple(
        _worker(options, devices, environment, name, index, port)
        for index, (name, port) in enumerate(zip(names, ports, strict=True))
    )
    argv = [f"--grpc-port={grpc_port}", f"--http-port={http_port}"]
    argv += [f"--workers={','.join(worker.address for worker in workers)}", *_router_argv(options, devices)]
    settings = _check(RouterSettings, argv, "--router-args", options.router_args)
    command = (sys.executable, "-m", "twostroke.router", *argv)
    router = ProcessSpec("router", command, _address(options.host, grpc_port), dict(environment))
    scheme = "https" if settings.http_tls_cert else "http"
    http = f"{scheme}://{_address(options.host, http_port)}/v1" if settings.front_end == "vllm" else ""
    return Plan(router, workers, router.address, http, settings.served_model_name or settings.model)


def _router_argv(options: UpOptions, devices: Devices) -> list[str]:
    argv = [f"--host={options.host}", f"--dtype={_dtype(options, devices)}"]
    argv.append(f"--front-end={'vllm' if options.engine == 'vllm' else 'plain'}")
    served = options.served_model_name
    if options.model:
        argv.append(f"--model={options.model}")
        served = served or (Path(options.model).name if Path(options.model).is_dir() else options.model)
    if served:
        argv.append(f"--served-model-name={served}")
    return [*argv, *options.router_args]


def _worker(
    options: UpOptions, devices: Devices, environment: Mapping[str, str], name: str, index: int, port: int
) -> ProcessSpec:
    argv = [f"--worker-id={name}", f"--role={name.partition('-')[0]}", f"--host={options.host}", f"--port={port}"]
    argv += [f"--engine={options.engine}", f"--dtype={_dtype(options, devices)}"]
    if options.model:
        argv.append(f"--model={options.model}")
    placed: dict[str, str] = {}
    if options.engine == "vllm" and devices.gpus:
        extra, placed = _on_gpu(options, devices, index)
        argv += extra
    elif options.engine == "vllm":
        placed_on = partial(_cores, devices.cores, count=options.cores_per_worker)
        own = placed_on(index)
        others = {core for other in range(options.prefill + options.decode) for core in placed_on(other)}
        argv.append(f"--cores={_listed(own)}")
        given = _check(WorkerSettings, options.worker_args, "--worker-args", options.worker_args)
        spare = [] if given.cores or given.tensor_parallel > 1 else sorted(others.difference(own))
        if spare:
            argv.append(f"--spare-cores={_listed(spare)}")
        placed = _on_cpu(devices, environment)
    argv += options.worker_args
    _check(WorkerSettings, argv, "--worker-args", options.worker_args)
    command = (sys.executable, "-m", "twostroke.worker", *argv)
    return ProcessSpec(name, command, _address(options.host, port), {**environment, **placed})


def _on_cpu(devices: Devices, environment: Mapping[str, str]) -> dict[str, str]:
    # TorchDynamo: the first use of logprobs would compile for minutes, in the middle of serving.
    return {"TORCHDYNAMO_DISABLE": environment.get("TORCHDYNAMO_DISABLE", "1"), **devices.tuned(environment)}


def _on_gpu(options: UpOptions, devices: Devices, index: int) -> tuple[list[str], dict[str, str]]:
    parallel = _check(WorkerSettings, options.worker_args, "--worker-args", options.worker_args).tensor_parallel
    slots = len(devices.gpus) // parallel
    if slots == 0:
        raise ConfigError(f"--tensor-parallel {parallel} needs as many GPUs; this machine shows {len(devices.gpus)}")
    slot = index % slots
    gpus = devices.gpus[slot * parallel : (slot + 1) * parallel]
    sharers = len(range(slot, options.prefill + options.decode, slots))
    # Workers take their share of the whole GPU, whoever else is on it.
    argv = [f"--gpu-memory-fraction={_GPU_MEMORY_FRACTION / sharers:.3f}"] if sharers > 1 else []
    return argv, {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _cores(cores: Sequence[int], index: int, count: int) -> list[int]:
    if not 0 < count <= len(cores):
        raise ConfigError(f"--cores-per-worker must be between 1 and {len(cores)}, the cores of this machine")
    return [cores[(index * count + offset) % len(cores)] for offset in range(count)]


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


def _dtype(options: UpOptions, devices: Devices) -> str:
    # Of bfloat16 on CPUs one kind was 2.7 times slower (emulated) and the other answered wrong (AMX).
    on_cpu = options.engine == "vllm" and not devices.gpus
    return options.dtype or ("float32" if on_cpu else "auto")


def _address(host: str, port: int) -> str:
    """Where a client on this machine reaches the host's port."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{local}]:{port}" if ":" in local else f"{local}:{port}"


def _check(kind: type[S], argv: Sequence[str], flag: str, extra: Sequence[str]) -> S:
    try:
        return read(kind, argv, "twostroke worker" if kind is WorkerSettings else "twostroke router")
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error.message}" if extra else error.message) from error
