"""What every benchmark's command line needs."""

from __future__ import annotations

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from twostroke.bench.record import FOLDER, Record
from twostroke.errors import TwostrokeError
from twostroke.launch.board import say

_WIDTH = 160
_INTERRUPTED = 130


def make_app() -> typer.Typer:
    """An application without frills."""
    return typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def make_console() -> Console:
    """Standard output, wide enough for a table where it is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=_WIDTH)


def make_say(console: Console) -> Callable[[str], None]:
    """Prints a line with the seconds since now before it."""
    started_s = time.monotonic()
    return lambda text: say(console, f"[{time.monotonic() - started_s:6.1f} s] {text}")


def command_line(name: str) -> str:
    """What to type to run this again."""
    return f"python -m twostroke.bench.{name} {shlex.join(sys.argv[1:])}".strip()


def log_folder(name: str) -> Path:
    """An existing folder for what the processes write."""
    folder = FOLDER / "logs" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def finish(record: Record, console: Console) -> None:
    """Writes and prints a record."""
    path = record.write()
    record.print(console)
    say(console, f"Written to {path}")


def end(name: str, work: Coroutine[Any, Any, None]) -> None:
    """Runs the work and ends the program: 0, 1 with one line for what could not be done, 130 when interrupted.

    SIGTERM and SIGHUP end it like Ctrl-C does: the work is cancelled and cleans up.
    """
    try:
        asyncio.run(_cancelled_by_signals(work))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(_INTERRUPTED)
    except TwostrokeError as error:
        sys.stderr.write(f"twostroke.bench.{name}: {error.message}\n")
        sys.exit(1)


async def _cancelled_by_signals(work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await work
