"""Processes: start them in groups of their own, learn how they end, take them down without leaving any behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from twostroke.errors import ConfigError

_LINGER_S = 1.0
_KILL_WAIT_S = 5.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start."""

    name: str
    command: tuple[str, ...]
    """The program's full path and its arguments."""
    address: str
    """host:port of its gRPC server."""
    environment: Mapping[str, str] = field(repr=False)


class Watched:
    """A group leader whose end is awaited. Needs a running event loop. ours: it is a child of this process.

    When the leader has ended, what it forgot of its process group is killed a second later, whoever is waiting.
    """

    def __init__(self, name: str, pid: int, *, ours: bool = False) -> None:
        self.name = name
        self.pid = pid
        self._ours = ours
        self._loop = asyncio.get_running_loop()
        self._burial: asyncio.Task[None] | None = None
        self._descriptor: int | None = None
        self.ended: asyncio.Future[int | None] = self._loop.create_future()
        """Its exit code, negative for a signal; None where only the parent could know."""
        try:
            # A pidfd names this very process, also after the pid has been given to another one.
            self._descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            self._end()
        else:
            self._loop.add_reader(self._descriptor, self._end)

    def _end(self) -> None:
        self.close()
        self.ended.set_result(_exit_code(self.pid) if self._ours else None)
        self._burial = self._loop.create_task(self._bury())

    async def _bury(self) -> None:
        await _until_empty(self.pid, _LINGER_S)
        self.kill_group()
        await _until_empty(self.pid, _KILL_WAIT_S)
        if self._ours:
            # Only now: an unreaped leader keeps its pid, so that the signal above could hit nobody else.
            os.waitpid(self.pid, 0)  # noqa: ASYNC222  it has ended, this does not block

    def close(self) -> None:
        """Stops watching; the process itself goes on."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = None

    def terminate(self) -> None:
        """Asks the process, not its children, to end."""
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, signal.SIGTERM)

    def kill_group(self) -> None:
        """Kills the process and the children it started, as far as they are left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def gone(self) -> None:
        """Waits until the process and its group are gone. Cancellation ends the waiting only."""
        await asyncio.wait([self.ended])
        if self._burial is not None:
            await asyncio.wait([self._burial])


def start(spec: ProcessSpec, log: Path) -> Watched:
    """Starts a process as the leader of its own group, its output in `log`.

    Raises ConfigError when it cannot be started. It outlives this process, and the terminal, unless it is taken down.
    """
    try:
        # Unlike subprocess.Popen this leaves no object that minds being forgotten while the process goes on.
        pid = os.posix_spawn(
            spec.command[0],
            spec.command,
            spec.environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            # No session of its own: Linux shares the cores among sessions first, and a router would wait for up to a
            # second where workers compute on every core.
            setpgroup=0,
            setsigdef=[signal.SIGPIPE],
        )
    except OSError as error:
        raise ConfigError(f"{spec.name}: cannot start {spec.command[0]}: {error.strerror}") from error
    return Watched(spec.name, pid, ours=True)


async def take_down(processes: Iterable[Watched], grace_s: float, hurry: asyncio.Event | None = None) -> list[str]:
    """Ends processes and everything that they started.

    All get SIGTERM at once and `grace_s` seconds; whoever is left then, or when `hurry` is set, is killed with its
    process group. Returns the names of the processes that had to be killed. Cancellation kills at once.
    """
    watched = list(processes)
    for process in watched:
        process.terminate()
    waits = [asyncio.create_task(_all_ended(watched))]
    if hurry is not None:
        waits.append(asyncio.create_task(_set(hurry)))
    try:
        await asyncio.wait(waits, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waits:
            task.cancel()
        killed = [process for process in watched if not process.ended.done()]
        for process in killed:
            process.kill_group()
    for process in watched:
        await process.gone()
    return [process.name for process in killed]


async def _all_ended(watched: Iterable[Watched]) -> None:
    for process in watched:
        await asyncio.wait([process.ended])


async def _set(event: asyncio.Event) -> None:
    await event.wait()


def _exit_code(pid: int) -> int:
    status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    assert status is not None
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


async def _until_empty(pgid: int, timeout_s: float) -> None:
    # The kernel tells nobody when a group becomes empty, so this has to look again and again.
    deadline = time.monotonic() + timeout_s
    while _runs(pgid) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def _runs(pgid: int) -> bool:
    """Whether any process of the group still runs; zombies do not."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            if os.getpgid(pid) == pgid and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def describe_exit(code: int | None) -> str:
    """How a process ended, in words."""
    if code is None:
        return "ended"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code}"


def last_lines(log: Path, count: int) -> list[str]:
    """The last lines of a log; none when there is no log."""
    try:
        with log.open(errors="replace") as lines:
            return [line.rstrip("\n") for line in deque(lines, maxlen=count)]
    except FileNotFoundError:
        return []
