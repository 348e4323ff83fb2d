"""`python -m twostroke.worker`: one worker process. Wiring only."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence

from twostroke.config import WorkerSettings
from twostroke.engine.base import Engine
from twostroke.errors import EngineError, TwostrokeError
from twostroke.flags import parse
from twostroke.telemetry.logs import set_up
from twostroke.telemetry.tracing import Tracer, open_tracer

log = logging.getLogger("twostroke.worker")

EXIT_ENGINE_LOST = 70


def build_engine(settings: WorkerSettings, worker_id: str, epoch: str) -> Engine:
    """The engine that the settings name; imports nothing of the other."""
    if settings.engine == "reference":
        from twostroke.engine.reference import ReferenceEngine

        return ReferenceEngine(settings, worker_id=worker_id, epoch=epoch)
    from twostroke.engine.vllm.core import VllmEngine

    return VllmEngine(settings, worker_id, epoch)


async def serve(settings: WorkerSettings) -> int:
    """Runs a worker until SIGTERM or SIGINT, or until its engine is lost. Returns the exit code."""
    from twostroke.worker.assembly import Worker

    worker_id = settings.worker_id or f"{settings.role}-{settings.port}"
    epoch = secrets.token_hex(8)
    engine = build_engine(settings, worker_id, epoch)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    tracer: Tracer | None = None
    try:
        # The engine may fork: before any thread or channel of gRPC, the tracer's included.
        info = await engine.start()
        # What was imported until now stays; looking through it again would stop a request.
        gc.collect()
        gc.freeze()
        tracer = open_tracer(settings.otlp_url, 1.0, "twostroke-worker", worker_id)
        worker = Worker(settings, engine, info, worker_id, epoch, tracer)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await worker.run(stop)
    except EngineError as error:
        log.error("%s", error)
        return EXIT_ENGINE_LOST
    finally:
        await engine.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)
    return 0


def main(argv: Sequence[str] | None = None, role: str | None = None) -> int:
    """Entry point; `role` presets --role."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if role is not None:
        arguments = ["--role", role, *arguments]
    settings = parse(WorkerSettings, arguments, "twostroke worker", __doc__ or "")
    set_up(settings.log_level, settings.log_format)
    if settings.engine == "vllm":
        from twostroke.engine.vllm.launch import tune_process

        tune_process()
    try:
        code = asyncio.run(serve(settings))
        if settings.engine == "vllm":
            # Everything is closed; what remains is seconds of libraries taking themselves apart.
            logging.shutdown()
            os._exit(code)
        return code
    except TwostrokeError as error:
        sys.stderr.write(f"twostroke worker: {error}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
