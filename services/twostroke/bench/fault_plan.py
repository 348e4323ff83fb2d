"""What is done to a cluster, one fault after another, and what became of the streams meanwhile."""

from __future__ import annotations

import asyncio
import random
import signal
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.bench.fault_proxy import FaultProxy
from twostroke.bench.record import Record

WORKER_KINDS = ("kill worker", "stop worker", "reset connection", "swallow connection")
KINDS = (*WORKER_KINDS, "kill router", "stop router")
HELD_UP_S = 0.25
"""A gap between two tokens that no step explains."""
LONGEST_S = 3.0
"""That a process is stopped, or a connection swallows."""


class Breakable(Protocol):
    """Processes by name, and the connections of the routers to the workers by the worker's name."""

    proxies: dict[str, FaultProxy]

    @property
    def routers(self) -> list[str]:
        """Names of the routers."""

    async def kill(self, name: str) -> None:
        """Kills a process; it is gone on return."""

    def start(self, name: str) -> None:
        """Starts it again."""

    def signal(self, name: str, number: int) -> None:
        """Sends it a signal."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What was done. Moments are monotonic seconds."""

    kind: str
    began_s: float
    over_s: float
    """All that was broken works again."""


async def break_once(cluster: Breakable, kind: str, choose: random.Random) -> None:
    """One fault, and its end. The victim works again, or starts, on return."""
    victim = choose.choice(cluster.routers if kind.endswith("router") else list(cluster.proxies))
    if kind.startswith("kill"):
        await cluster.kill(victim)
        cluster.start(victim)
    elif kind.startswith("stop"):
        cluster.signal(victim, signal.SIGSTOP)
        await asyncio.sleep(choose.uniform(HELD_UP_S, LONGEST_S))
        cluster.signal(victim, signal.SIGCONT)
    elif kind == "reset connection":
        cluster.proxies[victim].reset()
    else:
        cluster.proxies[victim].swallow()
        await asyncio.sleep(choose.uniform(HELD_UP_S, LONGEST_S))
        cluster.proxies[victim].heal()


def recoveries(gaps: Sequence[tuple[float, float]], faults: Sequence[Fault]) -> list[tuple[float, str]]:
    """For every gap with the beginning of a fault in it, the time from there to the gap's end, and the fault's kind."""
    found = []
    for begin_s, end_s in gaps:
        within = [(end_s - each.began_s, each.kind) for each in faults if begin_s - HELD_UP_S <= each.began_s <= end_s]
        if within:
            found.append(max(within))
    return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of the sorted values; None without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


def goodput(moments: Sequence[float], faults: Sequence[Fault], undisturbed: tuple[float, float]) -> float | None:
    """Tokens per second from each fault to its end, over tokens per second while nothing was broken.

    moments: of every token, in order. undisturbed: begin and end.
    """

    def per_s(windows: Sequence[tuple[float, float]]) -> float:
        tokens = sum(bisect_left(moments, end_s) - bisect_left(moments, begin_s) for begin_s, end_s in windows)
        return tokens / max(1e-9, sum(end_s - begin_s for begin_s, end_s in windows))

    before = per_s([undisturbed])
    return per_s([(fault.began_s, fault.over_s) for fault in faults]) / before if before else None


def kind_rows(
    record: Record, system: str, gaps: Sequence[tuple[float, float]], faults: Sequence[Fault]
) -> float | None:
    """Adds a row for each kind of fault. Returns the 99th percentile of all recoveries, None where none was needed."""
    times = recoveries(gaps, faults)
    for kind in dict.fromkeys(kind for kind in KINDS if any(fault.kind == kind for fault in faults)):
        own = [value for value, other in times if other == kind]
        record.row(
            system=system,
            fault=kind,
            times=sum(fault.kind == kind for fault in faults),
            streams_held_up=len(own),
            recovery_p50_s=percentile(own, 0.5),
            recovery_p99_s=percentile(own, 0.99),
        )
    return percentile([value for value, _ in times], 0.99)
