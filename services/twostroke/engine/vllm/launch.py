"""Starting vLLM's engine core, and what takes the time.

On CPU vLLM starts three processes one after another, each importing everything anew. Here the two children are forked
from this process after its imports; nothing but imports has run then, no thread and no gRPC. On GPUs, where a fork
after CUDA's initialisation is not allowed, vLLM's own method stays.
"""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from twostroke.config import WorkerSettings, child_environment, set_environment
from twostroke.engine.vllm.affinity import core_list
from twostroke.errors import ConfigError, EngineError
from twostroke.free_port import free_port
from twostroke.huge_pages import huge_page_tunables
from twostroke.model_path import locate_model

log = logging.getLogger(__name__)

DEFAULT_CPU_KV_BYTES = 1 << 30
LOOPBACK = frozenset({"127.0.0.1", "::1", "localhost"})
_PR_SET_PDEATHSIG = 1

# Imported before the fork, so that neither child imports them again.
_PRELOAD = (
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.v1.structured_output",
    "twostroke.engine.vllm.nixl",
    "twostroke.engine.vllm.direct.connector",
    "twostroke.engine.vllm.direct.scheduler",
    "twostroke.engine.vllm.extension",
    "twostroke.engine.vllm.scheduling",
    "twostroke.engine.vllm.forced_tokens",
)


class Phases:
    """Measures the parts of a start."""

    def __init__(self) -> None:
        self.durations_ms: list[tuple[str, float]] = []

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Times a block and logs it."""
        started = time.monotonic()
        yield
        duration_ms = (time.monotonic() - started) * 1000
        self.durations_ms.append((name, duration_ms))
        log.info("start: %s took %.1f s", name, duration_ms / 1000)


def is_cpu() -> bool:
    """Whether vLLM computes on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def prepare_environment(settings: WorkerSettings) -> int:
    """Sets what vLLM reads from the environment; call before importing it. Returns the KV side channel's port.

    Raises ConfigError for a model or an address that is not there, and for cores that are not this worker's to use,
    before seconds are spent on imports.
    """
    cores = _all_cores(settings)
    locate_model(settings.model)
    port = settings.kv_port or _free_port(settings.kv_host)
    values = {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": settings.kv_host,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "VLLM_LOGGING_LEVEL": settings.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # The first use of log probabilities would compile for minutes.
        "TORCHDYNAMO_DISABLE": "1",
        "NIXL_LOG_LEVEL": "WARN",
    }
    if cores:
        values["VLLM_CPU_OMP_THREADS_BIND"] = cores
    if Path(settings.model).is_dir():
        values["HF_HUB_OFFLINE"] = "1"
    if settings.kv_host in LOOPBACK and "UCX_NET_DEVICES" not in child_environment():
        # Left alone, UCX may choose a bridge or an interface that comes and goes.
        values["UCX_NET_DEVICES"] = "lo"
    set_environment(**values)
    return port


def _all_cores(settings: WorkerSettings) -> str:
    if not settings.spare_cores:
        return settings.cores
    if not settings.cores:
        raise ConfigError("--spare-cores needs --cores, this worker's own")
    if both := set(core_list(settings.cores)).intersection(core_list(settings.spare_cores)):
        raise ConfigError(f"--spare-cores names core {min(both)}, which is in --cores; name cores of other workers")
    if settings.tensor_parallel > 1:
        raise ConfigError("--spare-cores is for workers of one rank; leave it out with --tensor-parallel")
    return f"{settings.cores},{settings.spare_cores}"


def _free_port(host: str) -> int:
    try:
        return free_port(host)
    except OSError as error:
        raise ConfigError(f"cannot use {host} for the KV side channel: {error}; set --kv-host") from error


def engine_args(settings: WorkerSettings, kv_arguments: Mapping[str, Any]) -> Any:
    """vLLM's arguments for a worker. kv_arguments: those of its KV connector."""
    from vllm.config.kv_events import KVEventsConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    cpu = is_cpu()
    kv_bytes = settings.kv_bytes or (DEFAULT_CPU_KV_BYTES if cpu else None)
    return AsyncEngineArgs(
        model=locate_model(settings.model),
        # In bfloat16 vLLM's CPU backend answered a question wrong that float32 and transformers' bfloat16 get right.
        dtype="float32" if cpu and settings.dtype == "auto" else settings.dtype,
        max_model_len=settings.max_model_len_tokens or None,
        max_num_batched_tokens=settings.step_budget_tokens,
        max_num_seqs=settings.max_sequences,
        block_size=settings.block_size_tokens or None,
        tensor_parallel_size=settings.tensor_parallel,
        gpu_memory_utilization=settings.gpu_memory_fraction,
        kv_cache_memory_bytes=kv_bytes,
        enforce_eager=cpu if settings.eager is None else settings.eager,
        enable_prefix_caching=True,
        # Our scheduler tells of them itself.
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        # The front end of the router applied the model's generation settings already.
        generation_config="vllm",
        logits_processors=["twostroke.engine.vllm.forced_tokens:ForcedTokens"],
        enable_lora=settings.max_loras > 0,
        max_loras=max(1, settings.max_loras),
        max_lora_rank=settings.max_lora_rank,
        reasoning_parser=settings.reasoning_parser,
        worker_extension_cls="twostroke.engine.vllm.extension.WorkerExtension",
        otlp_traces_endpoint=settings.otlp_url or None,
        **kv_arguments,
    )


def create_config(settings: WorkerSettings, kv_arguments: Mapping[str, Any]) -> Any:
    """vLLM's configuration. Raises ConfigError with vLLM's own first line for a model or setting it refuses."""
    try:
        return engine_args(settings, kv_arguments).create_engine_config()
    except (ValueError, OSError) as error:
        raise refusal(settings.model, error) from error


def refusal(model: str, error: Exception) -> ConfigError:
    """What vLLM says against a model, in one line."""
    if isinstance(error, ValidationError):
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
    else:
        said = str(error).strip() or type(error).__name__
    return ConfigError(f"vLLM refuses model {model!r}: {said.splitlines()[0]}")


def start_client(config: Any) -> Any:
    """Starts the engine core's processes and waits for them. Raises EngineError when they do not come up."""
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.executor import Executor

    if is_cpu():
        for module in _PRELOAD:
            importlib.import_module(module)
        from twostroke.engine.vllm.waiting import sleep_between_messages

        sleep_between_messages()
        set_environment(VLLM_WORKER_MULTIPROC_METHOD="fork")
        os.register_at_fork(after_in_child=_die_with_parent)
    elif url := config.observability_config.otlp_traces_endpoint:
        # vLLM's processes look for it here. Where they fork from each other, an exporter's threads would not survive.
        set_environment(OTEL_EXPORTER_OTLP_TRACES_ENDPOINT=url)
    try:
        return EngineCoreClient.make_async_mp_client(config, Executor.get_class(config), log_stats=True)
    except (RuntimeError, TimeoutError, ValueError) as error:
        raise EngineError(f"vLLM's engine did not start: {error}; its own message is in the log above") from error


def _die_with_parent() -> None:
    # Without it a worker that is killed leaves its engine behind, with its memory and its ports.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def tune_process() -> None:
    """Starts this process again with what an engine on CPU must be started with, the OpenMP that vLLM wants preloaded
    and huge pages, unless it has that."""
    environment = child_environment()
    if Path("/dev/nvidia0").exists() or not sys.platform.startswith("linux"):
        return
    wanted = {"GLIBC_TUNABLES": huge_page_tunables(environment)}
    loaded, openmp = environment.get("LD_PRELOAD", ""), Path(sys.prefix) / "lib" / "libiomp5.so"
    # vLLM refuses two of them, and puts libgomp there itself in every process that has configured it.
    if not any(name in loaded for name in ("libiomp", "libomp", "libgomp")) and openmp.exists():
        wanted["LD_PRELOAD"] = ":".join(filter(None, [loaded, str(openmp)]))
    if all(environment.get(name) == value for name, value in wanted.items()):
        return
    set_environment(**wanted)
    os.execv(sys.executable, sys.orig_argv)  # noqa: S606 the same program again
