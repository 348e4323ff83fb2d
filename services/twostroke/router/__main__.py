"""`python -m twostroke.router`: one router process. Wiring only."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Sequence

from twostroke.config import RouterSettings
from twostroke.errors import TwostrokeError
from twostroke.flags import parse
from twostroke.router.assembly import Router
from twostroke.telemetry.logs import set_up


async def serve(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT; requests in flight may then go on for drain_s."""
    router = Router(settings)
    stop = asyncio.Event()

    def handle_signals() -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)

    async def handle_signals_again() -> None:
        await router.http_started()
        handle_signals()

    handle_signals()
    again = asyncio.create_task(handle_signals_again())
    try:
        await router.run(stop)
    finally:
        again.cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point."""
    settings = parse(RouterSettings, list(sys.argv[1:] if argv is None else argv), "twostroke router", __doc__ or "")
    set_up(settings.log_level, settings.log_format)
    try:
        asyncio.run(serve(settings))
        if settings.front_end == "vllm":
            # Everything is closed; what remains is seconds of libraries taking themselves apart.
            logging.shutdown()
            os._exit(0)
    except KeyboardInterrupt:
        return 130
    except (TwostrokeError, BaseExceptionGroup) as error:
        cause = first(error)
        if not isinstance(cause, TwostrokeError):
            raise
        sys.stderr.write(f"twostroke router: {cause}\n")
        return 2
    return 0


def first(error: BaseException) -> BaseException:
    """The first error within groups of errors."""
    return first(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


if __name__ == "__main__":
    sys.exit(main())
