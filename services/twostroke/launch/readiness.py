"""Whether a started cluster can serve, what it still waits for, and where the time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.launch.board import Board
from twostroke.v1.cluster_pb2 import WatchResponse, WorkerState, WorkerView
from twostroke.v1.worker_pb2 import StartPhase

ROUTER = "router"


@dataclass(slots=True)
class Readiness:
    """Takes the router's reports and keeps what `up` has to know. Times are seconds since the start."""

    board: Board
    addresses: Mapping[str, str]
    """Name of every started worker by its address."""
    answered_s: float | None = None
    """The router's first report."""
    ready_s: dict[str, float] = field(default_factory=dict)
    """When each process became ready."""
    phases: dict[str, list[StartPhase]] = field(default_factory=dict)
    """The parts of each worker's start."""
    waiting: dict[str, str] = field(default_factory=dict)
    """What each process that is not ready waits for."""

    def __post_init__(self) -> None:
        for name in (ROUTER, *self.addresses.values()):
            self._wait(name, "starting")

    @property
    def complete(self) -> bool:
        """Whether the router serves and every started worker takes requests."""
        return not self.waiting

    def missing(self) -> str:
        """The processes that are not ready, each with what it waits for."""
        return "; ".join(f"{name}: {text}" for name, text in self.waiting.items())

    def see(self, report: WatchResponse) -> None:
        """Takes one report of the router."""
        if self.answered_s is None:
            self.answered_s = self.board.elapsed_s
        for worker in report.workers:
            name = self.addresses.get(worker.address)
            if name is not None:
                self._see_worker(name, worker)
        refused = "; ".join(
            f"{pair.prefill_worker_id} and {pair.decode_worker_id} cannot exchange KV: {pair.reason}"
            for pair in report.refused_pairs
        )
        if report.ready:
            self._ready(ROUTER)
        else:
            # What it says in brackets is about the workers, which have lines of their own.
            self._wait(ROUTER, f"waits for {refused or report.waiting_for.partition(' (')[0] or 'something'}")

    def _see_worker(self, name: str, worker: WorkerView) -> None:
        if worker.info.start_phases:
            self.phases[name] = list(worker.info.start_phases)
        if worker.state == WorkerState.WORKER_STATE_READY:
            self._ready(name)
        elif worker.state == WorkerState.WORKER_STATE_UNREACHABLE and name not in self.ready_s:
            # It runs and has not opened its port; the text of the refused connection would only frighten.
            self._wait(name, "starting")
        else:
            self._wait(name, f"{state_name(worker)}{': ' if worker.detail else ''}{worker.detail}")

    def _ready(self, name: str) -> None:
        self.ready_s.setdefault(name, self.board.elapsed_s)
        self.waiting.pop(name, None)
        self.board.show(name, "ready", done=True)

    def _wait(self, name: str, text: str) -> None:
        self.waiting[name] = text
        self.board.show(name, text)

    def summary(self) -> list[str]:
        """Lines that say where the time went."""
        lines = [f"Ready after {max(self.ready_s.values(), default=0.0):.1f} s:"]
        for name in (ROUTER, *self.addresses.values()):
            parts = ", ".join(f"{phase.name} {phase.duration_ms / 1000:.1f}" for phase in self.phases.get(name, ()))
            if name == ROUTER and self.answered_s is not None:
                parts = f"answered after {self.answered_s:.1f}"
            lines.append(f"  {name:<12}{self.ready_s.get(name, 0.0):>6.1f} s  {parts}".rstrip())
        return lines


def state_name(worker: WorkerView) -> str:
    """A worker's state as one lower-case word."""
    return WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower()
