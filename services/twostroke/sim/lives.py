"""Events in virtual time, and the lives of the workers: asked for, ready, resting, draining, gone.

Events at one time are taken in a fixed order: arrivals, messages in the order in which they were sent, ends of steps by
worker. A message takes at least one quantum of time, so that no event makes another at its own time. Hence it makes no
difference whether an engine takes its steps one by one or many at once.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappush
from typing import Any

from twostroke.sim.batching import Batching
from twostroke.sim.clock import HORIZON_S, QUANTUM_S, exact
from twostroke.sim.engine import Engine
from twostroke.sim.fleet import Fleet, Role, WorkerKind
from twostroke.sim.limits import Listener
from twostroke.sim.placer import Placer
from twostroke.sim.recorder import UNSET, Recorder
from twostroke.sim.sequence import Sequence
from twostroke.sim.worker import Port, State, Worker

MESSAGE, STEP_END = 0, 1
ENDLESS = 1 << 60


class Lives(Listener):
    """The half of a cluster that knows nothing of requests."""

    def __init__(self, fleet: Fleet, placer: Placer, records: Recorder, *, step_by_step: bool) -> None:
        self.fleet = fleet
        self.records = records
        self.now_s = 0.0
        self.workers: list[Worker] = []
        self._placer = placer
        self._max_run = 1 if step_by_step else ENDLESS
        self._heap: list[tuple[float, int, int, Any, Any]] = []
        self._sent = 0
        self._ports: dict[int, tuple[Port, Port]] = {}
        for group in fleet.groups:
            for _ in range(group.count):
                self.add_worker(group.kind, group.role)

    def _ready(self, now_s: float) -> None:
        """A worker takes requests from now on."""

    def send(self, at_s: float, handler: Callable[[Any, float], None], payload: object) -> None:
        """Calls handler(payload, time) at a time, which is at least a quantum ahead."""
        self._sent += 1
        soonest_s = self.now_s + QUANTUM_S
        at_s = exact(at_s) if at_s > soonest_s else soonest_s
        heappush(self._heap, (at_s, MESSAGE, self._sent, handler, payload))

    def _push(self, end_s: float, engine: Engine, version: int) -> None:
        heappush(self._heap, (end_s, STEP_END, engine.index, version, engine))

    def add_worker(self, kind: WorkerKind, role: Role, start_s: float = 0.0) -> Worker:
        """Asks for a worker; it takes requests after start_s, never when that is infinite."""
        index = len(self.workers)
        first = self._placer.shortest_first
        engine = Engine(index, kind.limits, self, self._push, self.records.gaps, self._max_run, shortest_first=first)
        port = index // self.fleet.link.workers_per_port
        ports = self._ports.setdefault(port, (Port(), Port()))
        worker = Worker(f"{role.name}-{index}", kind, role, engine, ports)
        worker.since_s = self.now_s
        self.workers.append(worker)
        if (kind.limits.spare_model or kind.limits.busy_model) is not None:
            for each in self.workers:
                each.engine.meet([other.engine for other in self.workers if other is not each])
        if start_s > 0:
            worker.state = State.STARTING
            if start_s < HORIZON_S:
                self.send(self.now_s + start_s, self._start_worker, worker)
        self._placer.added(worker)
        return worker

    def drain(self, worker: Worker) -> None:
        """Sends it no more requests; it goes when it has none."""
        if worker.state is State.STARTING:
            self._remove(worker)
        elif worker.state is State.READY:
            worker.state = State.DRAINING
            self._placer.left(worker)
            self._end_drain(worker)

    def rest(self, worker: Worker) -> None:
        """Sends it no more requests until it is resumed."""
        if worker.state is State.READY:
            worker.state = State.RESTING
            self._placer.left(worker)

    def resume(self, worker: Worker) -> None:
        """Sends it requests again, of its role."""
        if worker.state in (State.READY, State.RESTING):
            worker.state = State.READY
            worker.engine.changed = True
            self._placer.left(worker)
            self._placer.added(worker)

    def _end_drain(self, worker: Worker) -> None:
        if worker.state is State.DRAINING and not worker.flights:
            self._remove(worker)

    def _remove(self, worker: Worker) -> None:
        worker.state = State.GONE
        worker.gone_s = self.now_s
        self._placer.left(worker)

    def _start_worker(self, worker: Worker, now_s: float) -> None:
        if worker.state is not State.STARTING:
            return
        worker.state = State.READY
        worker.engine.changed = True
        self._placer.added(worker)
        self._ready(now_s)

    def _restart(self, worker: Worker, now_s: float) -> None:
        worker.state = State.STARTING
        worker.paid_s += worker.gone_s - worker.since_s
        worker.since_s, worker.gone_s = now_s, -1.0
        worker.expected = worker.promised = worker.expected_context = 0
        self.send(now_s + worker.kind.start_s, self._start_worker, worker)

    # What engines tell and is only written down; see limits.Listener.

    def first_token(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        self.records.fill(sequence.request, now_s)

    def decode_started(self, sequence: Sequence, start_s: float, first_s: float) -> None:
        records, request = self.records, sequence.request
        if records.decode_s[request] == UNSET:
            records.decode_s[request] = start_s
        if records.first_s[request] == UNSET:
            records.first_s[request] = first_s

    def preempted(self, sequence: Sequence) -> None:
        self.records.preemptions += 1
