"""Settings. The only module that reads the environment.

Every setting has a flag (`--kv-connector`) and an environment variable (`TWOSTROKE_KV_CONNECTOR`); the flag wins.
Durations are in seconds, sizes in bytes or tokens, as the names say.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, SecretStr, StringConstraints, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from twostroke.errors import ConfigError

EngineKind = Literal["vllm", "reference"]
RoleName = Literal["prefill", "decode", "both"]
KvConnector = Literal["twostroke", "nixl"]
KvTransport = Literal["ucx", "nixl"]
FrontEndKind = Literal["vllm", "plain"]
PlacementKind = Literal["strict", "all", "one_pool"]
RolesMode = Literal["off", "advise", "on"]
LossMode = Literal["continue", "fail"]
LogFormat = Literal["text", "json"]
Address = Annotated[str, StringConstraints(pattern=r"^.+:\d+$")]

S = TypeVar("S", bound="_Settings")

DEFAULT_HTTP_PORT = 8000
DEFAULT_GRPC_PORT = 50051
DEFAULT_WORKER_PORT = 50061


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TWOSTROKE_", frozen=True, extra="forbid", env_ignore_empty=True)


class _ProcessSettings(_Settings):
    """What every process says of itself."""

    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR.")
    log_format: LogFormat = Field("text", description="text for people, json for one object per line.")
    metrics: bool = Field(True, description="Serve Prometheus metrics at /metrics.")
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of the metrics; 0 picks one, which the log names.")
    otlp_endpoint: str = Field(
        "", description="host:port or URL of an OTLP/gRPC receiver, such as localhost:4317, to send traces to."
    )

    @property
    def otlp_url(self) -> str:
        """The receiver's URL; empty when tracing is off."""
        plain = bool(self.otlp_endpoint) and "://" not in self.otlp_endpoint
        return f"http://{self.otlp_endpoint}" if plain else self.otlp_endpoint


class RpcSettings(BaseModel):
    """How gRPC servers and channels behave, on both sides alike."""

    model_config = {"frozen": True}

    max_message_bytes: int = Field(64 << 20, gt=0)
    keepalive_s: float = Field(10.0, gt=0)
    keepalive_timeout_s: float = Field(5.0, gt=0)
    ping_timeout_s: float = Field(5.0, gt=0)
    connect_timeout_s: float = Field(5.0, gt=0)
    reconnect_min_s: float = Field(0.1, gt=0)
    reconnect_max_s: float = Field(1.0, gt=0)
    tls_cert: str = Field("", description="PEM certificate of this process; its server then speaks TLS only.")
    tls_key: str = Field("", description="PEM key of that certificate.")
    tls_ca: str = Field("", description="PEM certificates to trust; channels then speak TLS only.")
    tls_verify_clients: bool = Field(
        True, description="Servers with a --rpc-tls-ca take only clients that it signed (mutual TLS)."
    )
    tls_server_name: str = Field(
        "", description="Name that servers' certificates must carry, where they are reached by address."
    )


class WorkerSettings(_ProcessSettings):
    """A worker: one engine behind PrefillService, DecodeService and WorkerService."""

    role: RoleName = Field("both", description="What routers send here: prefill, decode or both.")
    worker_id: str = Field("", description="Stable name in logs and status; role and port when empty.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(DEFAULT_WORKER_PORT, ge=0, le=65535, description="gRPC port to listen on; 0 picks one.")
    engine: EngineKind = Field("vllm", description="vllm, or reference: a deterministic engine for tests.")
    model: str = Field("", description="Folder or hub name of the model. Empty with vllm is an error.")
    dtype: str = Field("auto", description="Element type of weights and KV; auto is float32 on CPU, else the model's.")
    max_model_len_tokens: int = Field(0, ge=0, description="Longest sequence; 0 is the model's own.")
    step_budget_tokens: int = Field(512, gt=0, description="Most tokens one engine step computes.")
    most_step_s: float = Field(
        1.0,
        ge=0,
        description="How long a step is to take at most while short prompts come, so that they wait no longer; 0 is no "
        "bound. Long prompts beside them take longer for it.",
    )
    max_sequences: int = Field(64, gt=0, description="Most sequences one engine step runs.")
    kv_bytes: int = Field(0, ge=0, description="KV memory; 0 lets the engine choose (2 GiB on CPU).")
    kv_connector: KvConnector = Field(
        "twostroke",
        description="How KV moves between vLLM workers: ours, while prefill computes, or vLLM's nixl, afterwards.",
    )
    kv_transport: KvTransport = Field("ucx", description="What moves it under our connector: our UCX binding, or NIXL.")
    kv_library: str = Field("", description="Path of libucp.so.0; found by itself when empty.")
    kv_verify: bool = Field(True, description="Compare digests of all KV that arrives, where it lies in host memory.")
    kv_recompute_tokens: int = Field(
        512,
        ge=0,
        description="Prompt tokens that decode computes itself rather than fail, when their KV did not arrive.",
    )
    kv_host: str = Field("127.0.0.1", description="Address at which other workers fetch KV.")
    kv_port: int = Field(0, ge=0, le=65535, description="Port of the KV side channel; 0 picks a free one.")
    kv_lease_s: int = Field(30, gt=0, description="How long KV is held for a decode worker that does not ask for it.")
    kv_stall_s: float = Field(10.0, gt=0, description="How long decode waits for the next chunk of a prompt's KV.")
    block_size_tokens: int = Field(0, ge=0, description="Tokens per KV block; 0 is the engine's own.")
    cores: str = Field("", description="CPU cores for computing, such as '0' or '0-3'; empty is all.")
    spare_cores: str = Field(
        "", description="CPU cores of other workers, used as well for prompts while those leave them idle."
    )
    tensor_parallel: int = Field(1, gt=0, description="Devices per worker.")
    gpu_memory_fraction: float = Field(0.9, gt=0, le=1, description="Share of GPU memory to use.")
    max_loras: int = Field(0, ge=0, description="LoRA adapters that one step may use; 0 serves none.")
    max_lora_rank: int = Field(16, gt=0, description="Highest rank of an adapter.")
    reasoning_parser: str = Field(
        "", description="As the router's --vllm-args has it; grammars then rule after the reasoning, not within it."
    )
    eager: bool | None = Field(None, description="Skip compilation and graph capture; the default is to skip on CPU.")
    reference_step_ms: float = Field(1.0, ge=0, description="Reference engine: time of a step.")
    reference_token_us: float = Field(20.0, ge=0, description="Reference engine: time per prompt token in a step.")
    reference_blocks: int = Field(4096, gt=0, description="Reference engine: KV blocks.")
    reference_late: bool = Field(False, description="Reference engine: offer KV only when the prompt is done.")
    reference_faults: str = Field("", description="Reference engine: fault plan as JSON; see docs/reference_engine.md.")
    stall_s: float = Field(
        30.0, gt=0, description="Time without a step after which an engine counts as stalled; or 20 times its longest."
    )
    drain_s: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM.")
    step_log: str = Field("", description="File to which vLLM writes begin and end of every step; for benchmarks.")
    rpc: RpcSettings = RpcSettings()


class RouterSettings(_ProcessSettings):
    """The router: OpenAI HTTP and gRPC in, a cluster of workers behind."""

    router_id: str = Field("", description="Name in logs and status; host and port when empty.")
    front_end: FrontEndKind = Field("vllm", description="vllm serves HTTP and text; plain serves token ids over gRPC.")
    model: str = Field("", description="Folder or hub name of the model whose tokenizer and template to use.")
    served_model_name: str = Field("", description="Name that clients use; the model's own when empty.")
    host: str = Field("127.0.0.1", description="Address to listen on, HTTP and gRPC.")
    http_port: int = Field(DEFAULT_HTTP_PORT, ge=0, le=65535, description="HTTP port.")
    grpc_port: int = Field(DEFAULT_GRPC_PORT, ge=0, le=65535, description="gRPC port; 0 picks one.")
    workers: str = Field(
        f"127.0.0.1:{DEFAULT_WORKER_PORT}",
        description="Comma-separated host:port; a name with several addresses counts once per address.",
    )
    worker_timeout_s: float = Field(
        3.0, ge=1, description="A worker that has not reported for so long is lost; after 1 s it gets nothing new."
    )
    resolve_interval_s: float = Field(3.0, gt=0, description="Seconds between two looks at DNS names.")
    max_model_len_tokens: int = Field(0, ge=0, description="Longest sequence; 0 is the model's own.")
    dtype: str = Field("auto", description="As on the workers.")
    request_timeout_s: float = Field(600.0, gt=0, description="Deadline of requests that bring none.")
    handoff_timeout_s: float = Field(30.0, gt=0, description="How long a prompt's KV may take after prefill.")
    queue_requests: int = Field(
        1024, gt=0, description="Requests of one priority that may wait for room; one more is refused (429)."
    )
    tenant_requests: int = Field(
        0, ge=0, description="Requests that a tenant may have at work; its further ones wait. 0 is any number."
    )
    prefill_queue_tokens: int = Field(
        32768, ge=0, description="Prompt tokens that may wait on a prefill worker; 0 is any number."
    )
    placement: PlacementKind = Field(
        "strict",
        description="Ways that are open: strict, two workers; all, the cheapest of every way; one_pool, whole requests "
        "on every worker. The next five flags open or close single ones.",
    )
    p_then_d: bool | None = Field(None, description="A prefill worker reads, a decode worker writes.")
    d_alone: bool | None = Field(None, description="A decode worker reads and writes.")
    p_alone: bool | None = Field(None, description="A prefill worker reads and writes.")
    lent_decoder: bool | None = Field(None, description="A decode worker reads in small chunks beside its answers.")
    refuse: bool | None = Field(None, description="Refuse at once what no way is predicted to finish in time.")
    slo: str = Field(
        "default=2000/200",
        description="Classes of requests, separated by commas: name=ms to first token/ms between tokens. The header "
        "x-twostroke-slo chooses one; requests without it have the class default.",
    )
    roles: RolesMode = Field("off", description="Change workers' roles as demand does: off, advise (only says so), on.")
    patience_s: float = Field(
        5.0, ge=0, description="How long requests wait for workers when all of a kind have gone away, before 503."
    )
    prefill_attempts: int = Field(3, gt=0, description="How often a prompt is placed before the request fails.")
    unseeded_loss: LossMode = Field(
        "continue",
        description="An answer drawn without a seed whose worker is lost: continue goes on from its delivered tokens, "
        "fail ends it with ANSWER_LOST, to be asked again.",
    )
    lora: str = Field("", description="LoRA adapters to serve as models: name=folder, several separated by commas.")
    lora_updates: bool = Field(False, description="Takes adapters at run time: /v1/load_lora_adapter and its opposite.")
    sse_comment_s: float = Field(
        10.0, ge=0, description="Seconds without an event after which a stream gets a comment line; 0 sends none."
    )
    vllm_args: str = Field(
        "", description="Further arguments of vLLM's API server, such as '--tool-call-parser hermes'."
    )
    api_keys: SecretStr = Field(SecretStr(""), description="Keys of clients, separated by commas; none lets all in.")
    api_keys_file: str = Field("", description="File of further keys, one a line; lines that begin with # are not.")
    admin_key: SecretStr = Field(SecretStr(""), description="Key for what changes the cluster.")
    admin_key_file: str = Field("", description="File that holds the admin key.")
    trace_url: str = Field(
        "", description="Where the console finds traces, such as http://127.0.0.1:16686/trace/; the id is appended."
    )
    max_body_bytes: int = Field(32 << 20, gt=0, description="Largest HTTP request.")
    rate_per_s: float = Field(0.0, ge=0, description="Requests per second of each key, or address without; 0 is any.")
    rate_burst: int = Field(20, gt=0, description="Requests that may come at once on top of --rate-per-s.")
    http_tls_cert: str = Field("", description="PEM certificate; HTTP then speaks TLS only.")
    http_tls_key: str = Field("", description="PEM key of that certificate.")
    http_tls_ca: str = Field("", description="PEM certificates of which HTTP clients must have one (mutual TLS).")
    drain_s: float = Field(30.0, ge=0, description="How long running requests may go on after SIGTERM.")
    trace_ratio: float = Field(
        1.0, ge=0, le=1, description="Share of requests to trace; callers that send a traceparent decide themselves."
    )
    log_prompts: bool = Field(False, description="Write prompts, as token ids, into the line that each request gets.")
    rpc: RpcSettings = RpcSettings()

    def adapters(self) -> dict[str, str]:
        """Names and absolute folders of --lora. Raises ConfigError naming the entry that is not name=folder."""
        found: dict[str, str] = {}
        for entry in filter(None, (part.strip() for part in self.lora.split(","))):
            name, _, folder = entry.partition("=")
            if not name or not folder or name in found:
                raise ConfigError(
                    f"--lora has {entry!r}; write name=folder, each name once, several separated by commas"
                )
            found[name] = str(Path(folder).absolute())
        return found

    def worker_targets(self) -> tuple[str, ...]:
        """The configured workers. Raises ConfigError naming the entry that is not host:port."""
        targets = tuple(part.strip() for part in self.workers.split(",") if part.strip())
        for target in targets:
            host, _, port = target.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ConfigError(f"--workers has {target!r}; write host:port, several separated by commas")
        if not targets:
            raise ConfigError("--workers is empty; name at least one worker as host:port")
        return targets


class ClientSettings(_Settings):
    """What the commands that talk to a router bring along."""

    api_key: SecretStr = Field(SecretStr(""), description="Key to send to the router.")
    rpc: RpcSettings = RpcSettings()

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every call."""
        key = self.api_key.get_secret_value()
        return (("authorization", f"Bearer {key}"),) if key else ()


def load(kind: type[S], **flags: Any) -> S:
    """Settings from flags (those that are not None) over the environment.

    Raises ConfigError that names the flag of each wrong setting, or the variable that holds no JSON.
    """
    try:
        return kind(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            lines.append(f"--{name}: {problem['msg'].removeprefix('Value error, ')} (got {problem.get('input')!r})")
        raise ConfigError("; ".join(lines)) from error
    except SettingsError as error:
        broken = str(error).partition('field "')[2].partition('"')[0]
        raise ConfigError(f"TWOSTROKE_{broken.upper()}: not valid JSON") from error


def read_file(flag: str, path: str) -> bytes:
    """A file that a setting names. Raises ConfigError naming the flag when it cannot be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}") from error


def cache_dir() -> Path:
    """Folder for converted models."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TWOSTROKE_CACHE_DIR") or Path(base) / "twostroke")


def run_dir() -> Path:
    """Folder of what `twostroke up` started: pids and logs."""
    default = Path(tempfile.gettempdir()) / f"twostroke-{os.getuid()}"
    return Path(os.environ.get("TWOSTROKE_RUN_DIR") or default)


def child_environment(**extra: str) -> dict[str, str]:
    """The environment for a process we start."""
    return {**os.environ, **extra}


def set_environment(**values: str) -> None:
    """Sets variables that a library reads from the environment, before it is imported."""
    os.environ.update(values)
