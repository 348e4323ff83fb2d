"""The fleet in virtual time: arrivals, placement, strokes, hand-offs, failures.

Events at one time are taken in a fixed order: arrivals, messages in the order in which they were sent, ends of steps by
worker. A message takes at least one quantum of time, so that no event makes another at its own time. Hence it makes no
difference whether an engine takes its steps one by one or many at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from twostroke.errors import NoWorkerError
from twostroke.sim.clock import HORIZON_S, exact
from twostroke.sim.engine import Engine
from twostroke.sim.fleet import Failure, Fleet, Role, WorkerKind
from twostroke.sim.handoffs import Handoffs
from twostroke.sim.placer import Placer
from twostroke.sim.recorder import UNSET, Recorder
from twostroke.sim.sequence import Sequence, Stroke
from twostroke.sim.traffic import Traffic
from twostroke.sim.worker import NO_HASHES, Flight, Port, State, Worker

_MESSAGE, _STEP_END = 0, 1
ENDLESS = 1 << 60


class Cluster:
    """One simulation. placer: decides where requests go; gap_limit_s: of a good gap between tokens, 0 for none.

    step_by_step: the slow reference.
    """

    def __init__(
        self,
        fleet: Fleet,
        traffic: Traffic,
        placer: Placer,
        *,
        gap_limit_s: float = 0.0,
        step_by_step: bool = False,
    ) -> None:
        self.fleet = fleet
        self.traffic = traffic
        self.now_s = 0.0
        self.records = Recorder(len(traffic), gap_limit_s)
        self.workers: list[Worker] = []
        self.flights: dict[int, Flight] = {}
        self.handoffs = Handoffs(fleet)
        self.unfinished = len(traffic)
        """Requests to come, in the air or waiting for a worker."""
        self.arrived = 0
        self._placer = placer
        self._max_run = 1 if step_by_step else ENDLESS
        self._heap: list[tuple[float, int, int, Any, Any]] = []
        self._sent = 0
        self._hop_s = exact(fleet.hop_s)
        self._next = 0
        self.parked: deque[int] = deque()
        self._delivered: dict[int, int] = {}
        self._failed_on: dict[int, frozenset[str]] = {}
        self._ports: dict[int, tuple[Port, Port]] = {}
        for group in fleet.groups:
            for _ in range(group.count):
                self.add_worker(group.kind, group.role)
        for failure in fleet.failures:
            self.send(failure.at_s, self._fail, failure)

    # The loop.

    def run(self, progress: Callable[[float, int], None] | None = None) -> bool:
        """Runs to the end of the traffic. False when Ctrl-C ended it before; what was recorded so far stands.

        progress: told the time and the number of finished requests, now and then.
        """
        try:
            self._run(progress)
        except KeyboardInterrupt:
            return False
        return True

    def _run(self, progress: Callable[[float, int], None] | None) -> None:
        heap, traffic, arrivals = self._heap, self.traffic, self.traffic.arrival_s
        total = len(traffic)
        if traffic.concurrency:
            for request in range(min(traffic.concurrency, total)):
                self.send(0.0, self._arrive, request)
            self._next = min(traffic.concurrency, total)
            total = 0
        arrive, hop_s, told = self._arrive, self._hop_s, 0
        next_s = exact(arrivals[0]) + hop_s if total else float("inf")
        while heap or next_s < float("inf"):
            if not heap or next_s <= heap[0][0]:
                self.now_s = next_s
                request = self._next
                self._next = request + 1
                arrive(request, next_s)
                next_s = exact(arrivals[request + 1]) + hop_s if request + 1 < total else float("inf")
                told += 1
                if progress is not None and told >= 1000:
                    told = 0
                    progress(self.now_s, self.records.finished)
                continue
            now_s, kind, _, what, whom = heappop(heap)
            if kind == _STEP_END:
                if whom.version == what:
                    self.now_s = now_s
                    whom.step_end(now_s)
            elif self.unfinished:
                self.now_s = now_s
                what(whom, now_s)

    def send(self, at_s: float, handler: Callable[[Any, float], None], payload: object) -> None:
        """Calls handler(payload, time) at a time, which is at least a quantum ahead."""
        self._sent += 1
        heappush(self._heap, (max(exact(at_s), self.now_s + exact(0.0)), _MESSAGE, self._sent, handler, payload))

    def _push(self, end_s: float, engine: Engine, version: int) -> None:
        heappush(self._heap, (end_s, _STEP_END, engine.index, version, engine))

    # Workers come and go.

    def add_worker(self, kind: WorkerKind, role: Role, start_s: float = 0.0) -> Worker:
        """Asks for a worker; it takes requests after start_s, never when that is infinite."""
        index = len(self.workers)
        engine = Engine(index, kind.limits, self, self._push, self.records.gaps, self._max_run)
        port = index // self.fleet.link.workers_per_port
        ports = self._ports.setdefault(port, (Port(), Port()))
        worker = Worker(f"{role.name}-{index}", kind, role, engine, ports)
        worker.since_s = self.now_s
        self.workers.append(worker)
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
        parked, self.parked = self.parked, deque()
        for request in parked:
            self._place(request, now_s)

    def _fail(self, failure: Failure, now_s: float) -> None:
        worker = self.workers[failure.worker]
        if worker.state in (State.GONE, State.STARTING):
            return
        victims = [flight for flight in self.flights.values() if worker is flight.decode or worker is flight.prefill]
        worker.engine.halt(now_s)
        for flight in victims:
            self._abandon(flight, worker, now_s)
        worker.engine.clear()
        worker.flights = 0
        self._remove(worker)
        if failure.down_s >= 0:
            self.send(now_s + failure.down_s, self._restart, worker)

    def _restart(self, worker: Worker, now_s: float) -> None:
        worker.state = State.STARTING
        worker.paid_s += worker.gone_s - worker.since_s
        worker.since_s, worker.gone_s = now_s, -1.0
        worker.expected = worker.promised = worker.expected_context = 0
        self.send(now_s + worker.kind.start_s, self._start_worker, worker)

    # Requests.

    def _arrive(self, request: int, now_s: float) -> None:
        self.arrived += 1
        self.records.arrival_s[request] = now_s - self._hop_s
        self._place(request, now_s)

    def _place(self, request: int, now_s: float) -> None:
        traffic, records = self.traffic, self.records
        delivered = self._delivered.pop(request, 0) if self._delivered else 0
        prompt = traffic.prompt_tokens[request] + delivered
        output = traffic.output_tokens[request] - delivered
        hashes = traffic.hashes[request] if traffic.hashes else NO_HASHES
        avoid = self._failed_on.get(request, frozenset()) if self._failed_on else frozenset()
        try:
            prefill, decode, chunk = self._placer.place(prompt, output, hashes, avoid, now_s)
        except NoWorkerError:
            if delivered:
                self._delivered[request] = delivered
            self._park(request)
            return
        if decode is None:
            records.refused += 1
            self._over(request, now_s)
            return
        if not decode.kind.limits.fits(prompt + output) or (prefill and not prefill.kind.limits.fits(prompt)):
            records.failed += 1
            self._over(request, now_s)
            return
        records.attempts[request] += 1
        flight = Flight(request, delivered, decode)
        self.flights[request] = flight
        decode.flights += 1
        if prefill is None or prefill is decode:
            flight.writing = Sequence(request, Stroke.WHOLE, prompt, output, hashes)
            flight.writing.link = flight
            flight.writing.chunk_tokens = chunk or prompt
            decode.engine.enqueue(flight.writing, now_s)
            return
        prefill.flights += 1
        flight.prefill = prefill
        flight.reading = Sequence(request, Stroke.PREFILL, prompt, 1, hashes)
        flight.reading.link = flight
        flight.reading.chunk_tokens = chunk or prompt
        decode.promise(prompt)
        prefill.engine.enqueue(flight.reading, now_s)

    def _park(self, request: int) -> None:
        if any(worker.state is State.STARTING for worker in self.workers):
            self.parked.append(request)
        else:
            self._delivered.pop(request, None)
            self.records.failed += 1
            self._over(request, self.now_s)

    def _over(self, request: int, now_s: float) -> None:
        """A request is over, one way or another; in a closed loop the next one arrives."""
        self.unfinished -= 1
        if self.traffic.concurrency and self._next < len(self.traffic):
            self.send(now_s + self._hop_s, self._arrive, self._next)
            self._next += 1

    def _abandon(self, flight: Flight, lost: Worker | None, now_s: float) -> None:
        """A worker is lost, or decode had no room: frees what is held elsewhere and places the request again."""
        writing, reading, decode, prefill = flight.writing, flight.reading, flight.decode, flight.prefill
        if lost is not None and lost is prefill and reading is None:
            return
        request = flight.request
        delivered = flight.delivered + (flight.done and not self.fleet.decode_first_token)
        if reading is None and writing is not None:
            delivered = self.traffic.output_tokens[request] - writing.output_tokens + decode.engine.written(writing)
        if reading is not None and not flight.reserved:
            decode.unpromise(reading.prompt_tokens)
        if prefill is not None and writing is not None and decode is not lost:
            decode.engine.forget(writing, now_s)
        if prefill is not None and prefill is not lost and reading is not None:
            prefill.engine.cancel(reading, now_s)
        del self.flights[request]
        self._land(flight)
        name = (lost or decode).name
        self._failed_on[request] = self._failed_on.get(request, frozenset()) | {name}
        self._delivered[request] = delivered
        self.send(now_s + self._hop_s, self._place, request)

    def _land(self, flight: Flight) -> None:
        """Its workers are free of it."""
        for worker in (flight.decode, flight.prefill if flight.reading is not None else None):
            if worker is not None:
                worker.flights -= 1
                if worker.state is State.DRAINING:
                    self._end_drain(worker)

    # What engines tell; see limits.Listener.

    def prefill_started(self, engine: Engine, sequence: Sequence, now_s: float) -> None:
        records, request = self.records, sequence.request
        if records.started_s[request] == UNSET:
            records.started_s[request] = now_s
            records.cached_tokens += sequence.cached_tokens
        if sequence.stroke is Stroke.PREFILL and self.fleet.overlap:
            self._tell_decode(sequence.link, now_s)  # type: ignore[arg-type]

    def _tell_decode(self, flight: Flight, now_s: float) -> None:
        if flight.at_decode or not self._has_second_stroke(flight):
            return
        flight.at_decode = True
        self.send(now_s + self._hop_s, self._receive, flight)

    def _has_second_stroke(self, flight: Flight) -> bool:
        left = self.traffic.output_tokens[flight.request] - flight.delivered
        return left > 1 or self.fleet.decode_first_token

    def _receive(self, flight: Flight, now_s: float) -> None:
        if self.flights.get(flight.request) is not flight:
            return
        reading = flight.reading
        assert reading is not None
        output = self.traffic.output_tokens[flight.request] - flight.delivered
        if not self.fleet.decode_first_token:
            output -= 1
        writing = Sequence(flight.request, Stroke.DECODE, reading.prompt_tokens, output, reading.hashes)
        writing.link = flight
        flight.writing = writing
        flight.decode.engine.receive(writing, now_s)
        if not flight.reserved:
            self.send(now_s + self.fleet.handoff_timeout_s, self._give_up, flight)

    def _give_up(self, flight: Flight, now_s: float) -> None:
        """Decode had no room in time."""
        if self.flights.get(flight.request) is flight and not flight.reserved:
            self._abandon(flight, None, now_s)

    def reserved(self, engine: Engine, sequence: Sequence, now_s: float) -> None:
        flight: Flight = sequence.link  # type: ignore[assignment]
        flight.reserved = True
        flight.pulled = min(sequence.cached_tokens, sequence.prompt_tokens)
        flight.decode.unpromise(sequence.prompt_tokens)
        self._pull(flight, now_s)

    def chunk_done(self, engine: Engine, sequence: Sequence, now_s: float) -> None:
        flight: Flight = sequence.link  # type: ignore[assignment]
        flight.computed = max(flight.computed, sequence.computed)
        if sequence.computed == sequence.prompt_tokens:
            flight.done = True
            flight.done_s = now_s
            records, request = self.records, sequence.request
            if records.prefilled_s[request] == UNSET:
                records.prefilled_s[request] = now_s
                if not self.fleet.decode_first_token:
                    records.first_s[request] = now_s
            if not self._has_second_stroke(flight):
                flight.decode.unpromise(sequence.prompt_tokens)
                flight.reserved = True
                self.send(now_s, self._single_done, flight)
                return
            self._tell_decode(flight, now_s)
        if flight.reserved:
            self._pull(flight, now_s)

    def _single_done(self, flight: Flight, now_s: float) -> None:
        """The first token was the last."""
        if self.flights.get(flight.request) is not flight:
            return
        request, records = flight.request, self.records
        assert flight.prefill is not None
        assert flight.reading is not None
        flight.prefill.engine.release(flight.reading, now_s)
        for column in (records.kv_s, records.decode_s):
            if column[request] == UNSET:
                column[request] = flight.done_s
        self._finish(flight, flight.done_s, 0)

    def _pull(self, flight: Flight, now_s: float) -> None:
        end_s = self.handoffs.pull(flight, now_s)
        if end_s is not None:
            self.send(end_s, self._arrived, flight)

    def _arrived(self, flight: Flight, now_s: float) -> None:
        if self.flights.get(flight.request) is not flight:
            return
        records, request = self.records, flight.request
        records.handoffs += 1
        if records.kv_s[request] == UNSET:
            records.kv_s[request] = now_s
        writing, reading, prefill = flight.writing, flight.reading, flight.prefill
        assert writing is not None
        assert reading is not None
        assert prefill is not None
        writing.last_token_s = UNSET if self.fleet.decode_first_token else records.prefilled_s[request]
        flight.decode.engine.arrived(writing, now_s)
        prefill.engine.release(reading, now_s)
        flight.reading = None
        prefill.flights -= 1
        self._end_drain(prefill)

    def first_token(self, engine: Engine, sequence: Sequence, now_s: float) -> None:
        records, request = self.records, sequence.request
        for column in (records.prefilled_s, records.first_s, records.kv_s, records.decode_s):
            if column[request] == UNSET:
                column[request] = now_s

    def decode_started(self, sequence: Sequence, start_s: float, first_s: float) -> None:
        records, request = self.records, sequence.request
        if records.decode_s[request] == UNSET:
            records.decode_s[request] = start_s
        if records.first_s[request] == UNSET:
            records.first_s[request] = first_s

    def preempted(self, sequence: Sequence) -> None:
        self.records.preemptions += 1

    def finished(self, engine: Engine, sequence: Sequence, now_s: float) -> None:
        self._finish(sequence.link, now_s, sequence.over)

    def _finish(self, flight: Any, now_s: float, over: int) -> None:
        records, request = self.records, flight.request
        records.end_s[request] = now_s
        records.over[request] += over
        records.finished += 1
        del self.flights[request]
        self._land(flight)
        self._over(request, now_s)
