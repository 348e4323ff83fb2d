"""vLLM's own API server over the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.config import RouterSettings, read_file, set_environment
from twostroke.errors import ConfigError, TwostrokeError
from twostroke.model_path import locate_model
from twostroke.router.access import Access
from twostroke.router.cluster_service import ClusterService
from twostroke.router.console.pages import Console
from twostroke.router.dispatch import Dispatcher

# The last one is the outermost.
_MIDDLEWARE = (
    "twostroke.router.vllm.event_stream.EventStreams",
    "twostroke.router.vllm.trace_edge.TraceEdge",
    "twostroke.router.vllm.gate.ReadinessGate",
    "twostroke.router.vllm.access_gate.AccessGate",
)


def prepare_environment(settings: RouterSettings) -> None:
    """Sets what vLLM reads from the environment; call before importing it.

    Raises ConfigError for a model that is not there, before seconds are spent on imports.
    """
    locate_model(settings.model)
    values = {
        "VLLM_LOGGING_LEVEL": settings.log_level,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CONFIGURE_LOGGING": "0",
        "TORCHDYNAMO_DISABLE": "1",
        # Longer than proxies keep an idle connection: they would use one that is closed here.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "120",
    }
    if Path(settings.model).is_dir():
        values["HF_HUB_OFFLINE"] = "1"
    if settings.lora_updates:
        values["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    set_environment(**values)


def parse_arguments(settings: RouterSettings) -> Any:
    """vLLM's server arguments. Raises ConfigError for what vLLM refuses."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = [
        *("--model", locate_model(settings.model), "--host", settings.host, "--port", str(settings.http_port)),
        *("--dtype", settings.dtype),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
    ]
    if settings.served_model_name:
        arguments += ["--served-model-name", settings.served_model_name]
    if settings.max_model_len_tokens:
        arguments += ["--max-model-len", str(settings.max_model_len_tokens)]
    arguments += _tls(settings)
    adapters = settings.adapters()
    if adapters or settings.lora_updates:
        arguments.append("--enable-lora")
    if adapters:
        arguments += ["--lora-modules", *(f"{name}={folder}" for name, folder in adapters.items())]
    parser = make_arg_parser(FlexibleArgumentParser(exit_on_error=False))
    try:
        args = parser.parse_args([*arguments, *shlex.split(settings.vllm_args)])
        validate_parsed_serve_args(args)
        args.middleware = [*args.middleware, *_MIDDLEWARE]
    except (SystemExit, ValueError, TypeError) as error:
        raise ConfigError(f"--vllm-args {settings.vllm_args!r} is not what vLLM's server takes: {error}") from error
    return args


def _tls(settings: RouterSettings) -> list[str]:
    files = {
        "cert": ("--ssl-certfile", settings.http_tls_cert),
        "key": ("--ssl-keyfile", settings.http_tls_key),
        "ca": ("--ssl-ca-certs", settings.http_tls_ca),
    }
    given = {name: path for name, (_, path) in files.items() if path}
    if given and not given.keys() >= {"cert", "key"}:
        raise ConfigError("HTTP speaks TLS with both --http-tls-cert and --http-tls-key, or not at all")
    for name, path in given.items():
        read_file(f"--http-tls-{name}", path)
    arguments = [part for flag, path in files.values() if path for part in (flag, path)]
    return [*arguments, "--ssl-cert-reqs", str(int(ssl.CERT_REQUIRED))] if "ca" in given else arguments


def make_config(args: Any) -> Any:
    """vLLM's configuration for a front end: no weights, no accelerator, no KV memory.

    Raises ConfigError with vLLM's own first line for a model it refuses.
    """
    from vllm.config import LoRAConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    from twostroke.engine.vllm.launch import refusal

    engine_args = AsyncEngineArgs.from_cli_args(args)
    try:
        model_config = engine_args.create_model_config()
        model_config.quantization = None
        return VllmConfig(
            model_config=model_config,
            logging_config=engine_args.create_logging_config(),
            structured_outputs_config=engine_args.create_structured_outputs_config(),
            # Only that there is one: ranks and numbers are the workers' business.
            lora_config=LoRAConfig() if args.enable_lora else None,
        )
    except (ValueError, OSError) as error:
        raise refusal(args.model, error) from error


def _one_line(record: logging.LogRecord) -> bool:
    """A log filter: what was refused or lost is said in one line; vLLM's servers add where they heard of it."""
    error = record.exc_info[1] if record.exc_info else None
    if error is not None and isinstance(error.__cause__, TwostrokeError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {error.__cause__}", (), None
    return True


class HttpEdge:
    """Serves vLLM's routes. Build it before the first request, `run` it until cancelled."""

    def __init__(
        self,
        settings: RouterSettings,
        args: Any,
        config: Any,
        dispatcher: Dispatcher,
        access: Access,
        cluster: ClusterService,
    ) -> None:
        from twostroke.router.vllm.front_end import VllmFrontEnd, make_llm

        for handler in logging.getLogger().handlers:
            handler.addFilter(_one_line)
        self._settings = settings
        self._args = args
        self._llm = make_llm(
            config, dispatcher, log_stats=not args.disable_log_stats, sse_comment_s=settings.sse_comment_s
        )
        names = args.served_model_name or [args.model]
        self.front_end = VllmFrontEnd(self._llm, dispatcher, names[0])
        # Middleware is made by vLLM's server and finds these by way of the engine that it serves.
        core = self._llm.engine_core
        core.access, core.max_body_bytes = access, settings.max_body_bytes
        core.console = Console(cluster, lambda: [names[0], *settings.adapters()], settings.trace_url)

    async def run(self, started: Callable[[], None]) -> None:
        """Serves HTTP; calls `started` when it listens. Raises ConfigError when the port is taken."""
        from vllm.entrypoints.launchers.api_server.entry import build_and_serve
        from vllm.entrypoints.launchers.launcher import setup_server

        self._llm.engine_core.on_http_start = started
        try:
            address, sock = setup_server(self._args, reuse_port=False)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {self._settings.host}:{self._settings.http_port}: {error.strerror}; "
                "choose another with --http-port"
            ) from error
        with contextlib.closing(sock):
            # vLLM swallows the cancellation of its server and returns what remains to be awaited.
            remaining = await build_and_serve(self._llm, address, sock, self._args)
            await asyncio.shield(remaining)

    def close(self) -> None:
        """Ends vLLM's own tasks."""
        self._llm.shutdown()
