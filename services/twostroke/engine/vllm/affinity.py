"""On which cores threads run; OpenMP and vLLM pin more than is good for workers that share a machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def core_list(cores: str) -> list[int]:
    """The cores of "0,2-4"; empty for an empty text."""
    result: list[int] = []
    for part in filter(None, cores.split(",")):
        first, _, last = part.partition("-")
        result.extend(range(int(first), int(last or first) + 1))
    return result


def machine_id() -> str:
    """Alike for all processes of this machine, those in containers too; empty where the kernel does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def run_where_the_worker_may() -> None:
    """Undoes the pinning of the engine core's threads.

    OpenMP pins the thread that initialises it, and so every engine core of a machine to its first core, where it can
    wait for ever behind another worker that computes there.
    """
    allowed = os.sched_getaffinity(os.getppid())
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), allowed)


@contextmanager
def unpinned() -> Iterator[None]:
    """Threads started within may run on any core; the calling thread is put back where it was."""
    affinity = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:
        yield
    finally:
        os.sched_setaffinity(0, affinity)
