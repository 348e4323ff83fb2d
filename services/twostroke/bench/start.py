"""`python -m twostroke.bench.start`: how long a cluster takes to start.

First a cluster of the reference engine, five processes, several times; then, once, `twostroke up --detach` of the
bundled model, its question answered. Writes build/bench/start.json. Exit code 0 when all that is installed was
measured, whatever came out.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.record import Record
from twostroke.bench.running import Say
from twostroke.config import child_environment
from twostroke.errors import ConfigError, UnavailableError
from twostroke.launch import ask, devices, plan
from twostroke.launch.cluster import follow
from twostroke.launch.model import obtain
from twostroke.launch.processes import ProcessSpec, Watched, start, take_down
from twostroke.v1.cluster_pb2 import WatchResponse, WorkerState

app = make_app()

_PREFILL = _DECODE = 2
_REFERENCE_GOAL_S = 3.0
_UP_GOAL_S = 90.0
_TIMEOUT_S = 60.0
_UP_TIMEOUT_S = 600.0
_GRACE_S = 15.0
_PROMPT = range(1, 33)
_ANSWER_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Started:
    """Seconds since before the first process was started."""

    ready_s: float
    """All workers take requests and the router says that it can serve."""
    answered_s: float
    """A request was answered."""


def complete(view: WatchResponse, workers: int) -> bool:
    """Whether a router reports itself and all its workers ready."""
    ready = sum(worker.state == WorkerState.WORKER_STATE_READY for worker in view.workers)
    return view.ready and ready == workers


async def start_reference(logs: Path) -> Started:
    """Starts router, prefill and decode workers in processes of their own, asks once, takes them down.

    Raises UnavailableError when they are not ready within a minute.
    """
    environment = child_environment()
    options = plan.UpOptions(
        engine="reference",
        model="",
        served_model_name="",
        prefill=_PREFILL,
        decode=_DECODE,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        dtype="",
        worker_args=("--drain-s=1",),
        router_args=("--drain-s=1",),
    )
    made = plan.make(options, devices.detect(environment), environment)
    processes: list[Watched] = []
    try:
        began_s = time.monotonic()
        for spec in made.processes:
            # Known one by one, so that all are taken down when one cannot be started.
            processes.append(start(spec, logs / f"{spec.name}.log"))  # noqa: PERF401
        await _until_ready(made.grpc, len(made.workers))
        ready_s = time.monotonic() - began_s
        await ask.stream(made.grpc, ask.tokens(_PROMPT, _ANSWER_TOKENS), _TIMEOUT_S, lambda _: None)
        return Started(ready_s, time.monotonic() - began_s)
    finally:
        await take_down(processes, _GRACE_S)


async def _until_ready(target: str, workers: int) -> None:
    ready = asyncio.Event()

    def see(view: WatchResponse) -> None:
        if complete(view, workers):
            ready.set()

    watching = asyncio.create_task(follow(target, see, _TIMEOUT_S))
    waiting = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait({watching, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in (watching, waiting):
            task.cancel()
        await asyncio.gather(watching, waiting, return_exceptions=True)
    if not ready.is_set():
        raise UnavailableError(f"the reference cluster is not ready after {_TIMEOUT_S:.0f} s")


async def start_bundled(logs: Path) -> float:
    """Seconds that `twostroke up --detach` takes, interpreter and first answer included; ends it with `down`.

    Raises UnavailableError when it fails. Cancellation takes everything down.
    """
    with tempfile.TemporaryDirectory(prefix="twostroke-bench-") as run_dir:
        environment = child_environment(TWOSTROKE_RUN_DIR=run_dir)
        try:
            began_s = time.monotonic()
            code = await _twostroke(logs / "up.log", environment, "up", "--detach", "--http-port=0", "--grpc-port=0")
            took_s = time.monotonic() - began_s
        finally:
            await _twostroke(logs / "down.log", environment, "down")
            _keep_logs(Path(run_dir), logs)
    if code != 0:
        raise UnavailableError(f"twostroke up ended with code {code}; log: {logs / 'up.log'}")
    return took_s


async def _twostroke(log: Path, environment: Mapping[str, str], *arguments: str) -> int | None:
    """Runs a command; its exit code, None when it took too long. It is ended when this is cancelled."""
    command = (sys.executable, "-m", "twostroke", *arguments)
    process = start(ProcessSpec(arguments[0], command, "", environment), log)
    try:
        done, _ = await asyncio.wait([process.ended], timeout=_UP_TIMEOUT_S)
        return process.ended.result() if done else None
    finally:
        # An `up` that is told to end takes down what it started.
        await take_down([process], _GRACE_S)


def _keep_logs(run_dir: Path, logs: Path) -> None:
    for log in run_dir.glob("*.log"):
        shutil.copyfile(log, logs / f"up-{log.name}")


def _why_not_bundled() -> str:
    """Why the bundled model cannot be served here; empty when it can."""
    if importlib.util.find_spec("vllm") is None:
        return "the engine is not installed: make install"
    try:
        obtain("", lambda _: None)
    except ConfigError as error:
        return error.message
    return ""


async def measure(repetitions: int, with_bundled: bool) -> None:
    """The whole benchmark."""
    console = make_console()
    say = make_say(console)
    record = Record("start", command_line("start"))
    logs = log_folder("start")
    _record_reference(record, [await _repetition(record, logs, number, say) for number in range(repetitions)])
    missing = _why_not_bundled() if with_bundled else "left out with --no-bundled"
    took_s = None
    if missing:
        say(f"twostroke up is not measured: {missing}")
    else:
        say("twostroke up --detach of the bundled model")
        took_s = await start_bundled(logs)
        say(f"took {took_s:.1f} s")
        record.row(what="twostroke up --detach, bundled model", ready_s=None, answered_s=took_s)
    record.check(
        "twostroke up to the first answer, installed",
        took_s,
        "s",
        f"< {_UP_GOAL_S:.0f} s" + (f" ({missing})" if missing else ""),
        took_s is not None and took_s < _UP_GOAL_S,
    )
    finish(record, console)


async def _repetition(record: Record, logs: Path, number: int, say: Say) -> Started:
    started = await start_reference(logs)
    say(f"reference cluster {number + 1}: ready after {started.ready_s:.2f} s, answer after {started.answered_s:.2f} s")
    record.row(what=f"reference cluster, start {number + 1}", ready_s=started.ready_s, answered_s=started.answered_s)
    return started


def _record_reference(record: Record, starts: Sequence[Started]) -> None:
    median_s = statistics.median(started.ready_s for started in starts)
    record.check(
        f"a cluster of 1 router + {_PREFILL} prefill + {_DECODE} decode in separate processes starts, reference engine "
        f"(median of {len(starts)})",
        median_s,
        "s",
        f"< {_REFERENCE_GOAL_S:.0f} s",
        median_s < _REFERENCE_GOAL_S,
    )


@app.command()
def main(
    repetitions: Annotated[int, typer.Option(min=1, metavar="N", help="Starts of the reference cluster.")] = 5,
    bundled: Annotated[bool, typer.Option(help="Measure `twostroke up` of the bundled model too.")] = True,
) -> None:
    """Measures how long clusters take to start; writes build/bench/start.json."""
    end("start", measure(repetitions, bundled))


if __name__ == "__main__":
    app()
