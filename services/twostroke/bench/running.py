"""Starts stacks, waits until they answer, takes them down whatever happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from twostroke.bench.load import Answer, Connection, get_status, request_body
from twostroke.bench.meter import descendants
from twostroke.bench.stacks import Stack
from twostroke.errors import UnavailableError
from twostroke.launch.processes import ProcessSpec, Watched, describe_exit, last_lines, start, take_down

Say = Callable[[str], None]

PROBE_PROMPT = list(range(2000, 2300))
PROBE_TOKENS = 24

_READY_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.5
_GRACE_S = 15.0
_LOG_LINES = 15


class Running:
    """One stack whose processes run."""

    def __init__(self, stack: Stack, logs: Path) -> None:
        self.stack = stack
        self._logs = logs
        self.processes: dict[str, Watched] = {}

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self._logs / f"{name}.log"

    async def start(self, say: Say) -> Answer:
        """Starts all stages; returns the answer to the probe. Raises UnavailableError when it does not come up."""
        began_s = time.monotonic()
        for stage in self.stack.stages:
            for spec in stage:
                self.processes[spec.name] = start(spec, self.log(spec.name))
            if stage is not self.stack.stages[-1]:
                await asyncio.gather(*(self._until_healthy(spec) for spec in stage))
        answer = await self._until_answered(began_s + _READY_TIMEOUT_S)
        say(f"{self.stack.name}: answers after {time.monotonic() - began_s:.0f} s")
        return answer

    async def _until_healthy(self, spec: ProcessSpec) -> None:
        host, _, port = spec.address.rpartition(":")
        deadline_s = time.monotonic() + _READY_TIMEOUT_S
        while await get_status(host, int(port), "/health") != 200:
            self.check_alive()
            if time.monotonic() > deadline_s:
                raise UnavailableError(
                    f"{spec.name} is not up after {_READY_TIMEOUT_S:.0f} s; log: {self.log(spec.name)}"
                )
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _until_answered(self, deadline_s: float) -> Answer:
        problem = "nothing listens"
        while time.monotonic() < deadline_s:
            self.check_alive()
            if await get_status(*self.stack.address, "/v1/models") == 200:
                try:
                    return await self.probe()
                except UnavailableError as error:
                    problem = error.message
            await asyncio.sleep(_LOOK_EVERY_S)
        raise UnavailableError(f"{self.stack.name} gives no answer ({problem}); logs in {self._logs}")

    async def probe(self) -> Answer:
        """One request that every system gets alike, alone on the machine."""
        connection = await Connection.open(*self.stack.address)
        try:
            return await connection.ask(request_body(PROBE_PROMPT, PROBE_TOKENS))
        finally:
            connection.close()

    def check_alive(self) -> None:
        """Raises UnavailableError with the last lines of its log when a process has ended."""
        for process in self.processes.values():
            if process.ended.done():
                path = self.log(process.name)
                lines = "".join(f"\n  | {line}" for line in last_lines(path, _LOG_LINES))
                raise UnavailableError(f"{process.name} {describe_exit(process.ended.result())}; log: {path}{lines}")

    def groups(self) -> dict[str, list[int]]:
        """Pids by what they do: router, front_ends, engines."""
        front_ends = [self.processes[name].pid for name in self.stack.front_ends]
        return {
            "router": [self.processes[name].pid for name in self.stack.routers],
            "front_ends": front_ends,
            "engines": [child for pid in front_ends for child in descendants(pid)],
        }


@asynccontextmanager
async def running(stacks: Sequence[Stack], logs: Path, say: Say) -> AsyncIterator[list[tuple[Running, Answer]]]:
    """The stacks, started side by side, each with its answer to the probe. All are gone afterwards.

    logs: an existing folder. Raises UnavailableError when one does not come up. Cancellation takes them down.
    """
    started = [Running(stack, logs) for stack in stacks]
    try:
        answers = await _start_all(started, say)
        yield list(zip(started, answers, strict=True))
    finally:
        say("taking everything down")
        killed = await take_down([process for each in started for process in each.processes.values()], _GRACE_S)
        if killed:
            say(f"had to kill {', '.join(killed)}")


async def _start_all(started: Sequence[Running], say: Say) -> list[Answer]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each.start(say)) for each in started]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
