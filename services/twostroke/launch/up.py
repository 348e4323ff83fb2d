"""`twostroke up`: starts a cluster on this machine, shows it working, watches over it, takes it down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from rich.console import Console

from twostroke.errors import TwostrokeError, UnavailableError
from twostroke.launch import ask, timeline
from twostroke.launch.board import Board, say
from twostroke.launch.cluster import follow
from twostroke.launch.plan import Plan
from twostroke.launch.processes import Watched, describe_exit, last_lines, start, take_down
from twostroke.launch.readiness import Readiness
from twostroke.launch.state import ProcessId, ProcessRecord, RunDir, RunState
from twostroke.v1.cluster_pb2 import WatchResponse
from twostroke.v1.inference_pb2 import GenerateRequest

_LOG_LINES = 20
_ASK_TIMEOUT_S = 120.0
INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Manner:
    """How `up` behaves."""

    question: GenerateRequest | None
    """Asked once all is ready."""
    question_text: str
    """The question as it is shown."""
    detach: bool
    """Returns when all is ready and the question is answered; the cluster stays."""
    ready_timeout_s: float
    grace_s: float
    """Time for the processes to end after SIGTERM."""


@dataclass(slots=True)
class _Up:
    plan: Plan
    run_dir: RunDir
    manner: Manner
    console: Console
    state: RunState
    processes: list[Watched] = field(default_factory=list)
    serving: bool = False

    def start_all(self) -> None:
        self.run_dir.clear_logs()
        for spec in self.plan.processes:
            log = self.run_dir.log_path(spec.name)
            process = start(spec, log)
            self.processes.append(process)
            record = ProcessRecord(spec.name, ProcessId.of(process.pid), spec.address, spec.command, str(log))
            self.state = replace(self.state, processes=(*self.state.processes, record))
            # After each, so that whatever ends this process, nothing runs that `down` does not know of.
            self.run_dir.save(self.state)

    async def work(self) -> None:
        readiness = await self._until_ready()
        for line in readiness.summary():
            say(self.console, line)
        self._introduce()
        if self.manner.question is not None:
            await self._ask(self.manner.question)
        if not self.manner.detach:
            self.serving = True
            say(self.console, "Serving. Ctrl-C ends it.", "bold")
            await self._watch_over()

    async def _until_ready(self) -> Readiness:
        addresses = {spec.address: spec.name for spec in self.plan.workers}
        with Board(self.console, [spec.name for spec in self.plan.processes]) as board:
            readiness = Readiness(board, addresses)
            complete = asyncio.Event()

            def see(report: WatchResponse) -> None:
                readiness.see(report)
                if readiness.complete:
                    complete.set()

            timeout_s = self.manner.ready_timeout_s
            tasks = {
                asyncio.create_task(follow(self.plan.grpc, see, timeout_s)),
                asyncio.create_task(complete.wait()),
                asyncio.create_task(self._first_end()),
            }
            try:
                done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        self._require_all("before it was ready")
        if not readiness.complete:
            raise UnavailableError(
                f"not ready after {timeout_s:.0f} s (--ready-timeout-s); {readiness.missing()}; "
                f"logs in {self.run_dir.path}"
            )
        return readiness

    async def _first_end(self) -> None:
        await asyncio.wait([process.ended for process in self.processes], return_when=asyncio.FIRST_COMPLETED)

    def _require_all(self, when: str) -> None:
        for process in self.processes:
            if process.ended.done():
                log = self.run_dir.log_path(process.name)
                lines = "".join(f"\n  | {line}" for line in last_lines(log, _LOG_LINES))
                how = describe_exit(process.ended.result())
                raise UnavailableError(f"{process.name} {how} {when}; log: {log}{lines}")

    def _introduce(self) -> None:
        if self.plan.http:
            say(self.console, f"HTTP  {self.plan.http}")
            say(self.console, f"Page  {self.plan.http.removesuffix('/v1')}/console")
        say(self.console, f"gRPC  {self.plan.grpc}")
        if self.plan.http:
            body = {"model": self.plan.model, "messages": [{"role": "user", "content": "Hello"}], "stream": True}
            say(
                self.console,
                f"Try   curl -N {self.plan.http}/chat/completions -H 'Content-Type: application/json' "
                f"-d '{json.dumps(body)}'",
            )

    async def _ask(self, question: GenerateRequest) -> None:
        say(self.console, f"\n> {self.manner.question_text}", "bold")

        def show(piece: str) -> None:
            self.console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)

        try:
            last = await ask.stream(self.plan.grpc, question, _ASK_TIMEOUT_S, show)
        except TwostrokeError as error:
            self._require_all("during the question")
            raise UnavailableError(f"the question failed: {error.message}; logs in {self.run_dir.path}") from error
        say(self.console, "\n")
        for line in timeline.render(last.timeline, last.usage):
            say(self.console, line)
        say(self.console, "")

    async def _watch_over(self) -> None:
        left = {process.ended: process for process in self.processes}
        while left:
            ended, _ = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for future in ended:
                process = left.pop(future)
                how = describe_exit(future.result())
                self.state = self.state.with_exit(process.name, how)
                self.run_dir.save(self.state)
                log = self.run_dir.log_path(process.name)
                rest = "the others go on" if left else "nothing is left"
                say(self.console, f"{process.name} {how}; {rest}; log: {log}", "red")
        raise UnavailableError("all processes have ended")


async def run(plan: Plan, run_dir: RunDir, manner: Manner, console: Console) -> int:
    """Starts the plan, waits until it is ready, asks the question, serves until SIGINT, SIGTERM or SIGHUP.

    Returns the exit code: 0 after serving or detaching, 1 when something failed, 130 when interrupted before all was
    ready. Whatever happens, cancellation included, nothing stays behind but a detached cluster and the logs.
    """
    stop, hurry = asyncio.Event(), asyncio.Event()
    supervisor = ProcessId.of(os.getpid())
    up = _Up(plan, run_dir, manner, console, RunState(plan.grpc, plan.http, plan.model, supervisor))
    leave = False
    with _signals(stop, hurry):
        try:
            up.start_all()
            code = await _until_stopped(up, stop)
            leave = code == 0 and manner.detach and not stop.is_set()
        except TwostrokeError as error:
            say(console, f"twostroke up: {error.message}", "red")
            code = 1
        finally:
            if leave:
                _release(up)
            else:
                stop.set()
                await _end(up, hurry)
    return code


async def _until_stopped(up: _Up, stop: asyncio.Event) -> int:
    work = asyncio.create_task(up.work())
    stopped = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
            return 0
        return 0 if up.serving else INTERRUPTED
    finally:
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)


def _release(up: _Up) -> None:
    for process in up.processes:
        process.close()
    up.run_dir.save(replace(up.state, supervisor=None))
    say(up.console, "Runs in the background: `twostroke status`, `twostroke logs`, `twostroke down`.", "bold")


async def _end(up: _Up, hurry: asyncio.Event) -> None:
    if any(not process.ended.done() for process in up.processes):
        say(up.console, "Taking everything down (again Ctrl-C: at once).")
    killed = await take_down(up.processes, up.manner.grace_s, hurry)
    if killed:
        say(up.console, f"Had to kill {', '.join(killed)}.", "red")
    up.run_dir.clear()


@contextlib.contextmanager
def _signals(stop: asyncio.Event, hurry: asyncio.Event) -> Iterator[None]:
    """The first signal sets `stop`, any further one `hurry`."""

    def notice() -> None:
        (hurry if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in handled:
        loop.add_signal_handler(number, notice)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
