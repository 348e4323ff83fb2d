"""CPU time of processes, in seconds of user and system time together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import psutil

# The kernel's clock of a process's CPU time, threads that have ended included; clock_getcpuclockid(3) makes it so.
# psutil's figure is the same in steps of 10 ms.
_CPUCLOCK_SCHED = 2


def cpu_s(pid: int) -> float:
    """CPU time that a process has used, its children not included; 0 for one that is gone."""
    try:
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    except OSError:
        return 0.0


def machine_s() -> float:
    """CPU time that the whole machine has given away, to its host too; what ran with low priority is not counted."""
    times = psutil.cpu_times()
    return float(times.user + times.system + times.irq + times.softirq + times.steal)


def descendants(pid: int) -> list[int]:
    """The processes below a process now."""
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


class Meter:
    """CPU time of groups of processes since `start`. The processes must outlive the measurement."""

    def __init__(self, groups: Mapping[str, Iterable[int]]) -> None:
        self._groups = {name: tuple(pids) for name, pids in groups.items()}
        self._started = self._read()

    def _read(self) -> dict[str, float]:
        return {name: sum(cpu_s(pid) for pid in pids) for name, pids in self._groups.items()}

    def start(self) -> None:
        """Counts from now on."""
        self._started = self._read()

    def used_s(self) -> dict[str, float]:
        """CPU time of each group since `start`."""
        return {name: now - self._started[name] for name, now in self._read().items()}
