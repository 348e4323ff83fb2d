"""vLLM's own API server over the cluster."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twostroke.config import RouterSettings, locate_model, set_environment
from twostroke.errors import ConfigError
from twostroke.router.dispatch import Dispatcher

# The last one is the outermost.
_MIDDLEWARE = ("twostroke.router.vllm.event_stream.EventStreams", "twostroke.router.vllm.gate.ReadinessGate")


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


class HttpEdge:
    """Serves vLLM's routes. Build it before the first request, `run` it until cancelled."""

    def __init__(self, settings: RouterSettings, args: Any, config: Any, dispatcher: Dispatcher) -> None:
        from twostroke.router.vllm.front_end import VllmFrontEnd, make_llm

        self._settings = settings
        self._args = args
        self._llm = make_llm(
            config, dispatcher, log_stats=not args.disable_log_stats, sse_comment_s=settings.sse_comment_s
        )
        names = args.served_model_name or [args.model]
        self.front_end = VllmFrontEnd(self._llm, dispatcher, names[0])

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
