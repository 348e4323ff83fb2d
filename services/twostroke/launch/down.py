"""`twostroke down`: ends what `up` started, whether that `up` still watches over it or not."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import psutil

from twostroke.launch.processes import Watched, take_down
from twostroke.launch.state import RunDir, RunState

_MARGIN_S = 10.0


async def down(run_dir: RunDir, grace_s: float) -> tuple[list[str], list[str]]:
    """Ends every process of the folder's state file and removes the file.

    Processes get SIGTERM and `grace_s` seconds, then SIGKILL, their children with them. Returns the names of those that
    ran and of those that had to be killed. Raises ConfigError for a state file that cannot be read.
    """
    state = run_dir.load()
    if state is None:
        return [], []
    names = [record.name for record in state.alive()]
    if state.supervisor is not None and state.supervisor.alive():
        await _end_supervisor(state.supervisor.pid, grace_s)
        state = run_dir.load()
        if state is None:
            return names, []
    killed = await take_down(_left(state), grace_s)
    run_dir.clear()
    return names, killed


async def _end_supervisor(pid: int, grace_s: float) -> None:
    """It takes its processes down itself; if it does not in time, it is killed and we do."""
    watched = Watched("up", pid)
    try:
        watched.terminate()
        await asyncio.wait([watched.ended], timeout=grace_s + _MARGIN_S)
        if not watched.ended.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await asyncio.wait([watched.ended], timeout=_MARGIN_S)
    finally:
        watched.close()


def _left(state: RunState) -> list[Watched]:
    # A pid that now belongs to somebody else must not be touched; a dead leader's group may still hold its children.
    return [
        Watched(record.name, record.process.pid)
        for record in state.processes
        if record.process.alive() or not psutil.pid_exists(record.process.pid)
    ]
