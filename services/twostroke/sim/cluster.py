"""The fleet in virtual time: arrivals, placement, strokes, hand-offs, failures. The order of events: lives.py."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop
from math import inf
from typing import Any

from twostroke.errors import NoWorkerError
from twostroke.sim.batching import Batching
from twostroke.sim.clock import exact
from twostroke.sim.fleet import Failure, Fleet
from twostroke.sim.handoffs import Handoffs
from twostroke.sim.lives import STEP_END, Lives
from twostroke.sim.placer import Placer
from twostroke.sim.recorder import UNSET, Recorder
from twostroke.sim.sequence import Sequence, Stroke
from twostroke.sim.traffic import Traffic
from twostroke.sim.worker import NO_HASHES, NOBODY, Flight, State, Worker


class Cluster(Lives):
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
        super().__init__(fleet, placer, Recorder(len(traffic), gap_limit_s), step_by_step=step_by_step)
        self.traffic = traffic
        self.flights: dict[int, Flight] = {}
        self.parked: deque[int] = deque()
        """Requests that wait for a worker to be ready."""
        self.handoffs = Handoffs(fleet)
        self.unfinished = len(traffic)
        """Requests to come, in the air or parked."""
        self.arrived = 0
        self._hop_s = exact(fleet.hop_s)
        self._next = 0
        self._delivered: dict[int, int] = {}
        """Tokens that clients of requests that lost their worker have."""
        self._failed_on: dict[int, frozenset[str]] = {}
        for failure in fleet.failures:
            self.send(failure.at_s, self._fail, failure)

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
        next_s = exact(arrivals[0]) + hop_s if total else inf
        while heap or next_s < inf:
            if not heap or next_s <= heap[0][0]:
                self.now_s = next_s
                request = self._next
                self._next = request + 1
                arrive(request, next_s)
                next_s = exact(arrivals[request + 1]) + hop_s if request + 1 < total else inf
                told += 1
                if progress is not None and told % 1000 == 0:
                    progress(self.now_s, self.records.finished)
                continue
            now_s, kind, _, what, whom = heappop(heap)
            if kind == STEP_END:
                if whom.version == what:
                    self.now_s = now_s
                    whom.step_end(now_s)
            elif self.unfinished:
                self.now_s = now_s
                what(whom, now_s)

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
        avoid = self._failed_on.get(request, NOBODY) if self._failed_on else NOBODY
        asked = traffic.asked[request] if traffic.asked else None
        try:
            prefill, decode, chunk = self._placer.place(prompt, hashes, avoid, now_s, asked)
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
        flight = Flight(request, delivered, decode, asked.slo if asked else None)
        self.flights[request] = flight
        decode.take(flight.slo)
        if prefill is None or prefill is decode:
            flight.writing = Sequence(request, Stroke.WHOLE, prompt, output, hashes)
            flight.writing.link = flight
            flight.writing.chunk_tokens = chunk or prompt
            decode.engine.enqueue(flight.writing, now_s)
            return
        prefill.take(flight.slo)
        flight.prefill = prefill
        flight.reading = Sequence(request, Stroke.PREFILL, prompt, 1, hashes)
        flight.reading.link = flight
        flight.reading.chunk_tokens = chunk or prompt
        decode.promise(prompt)
        prefill.engine.enqueue(flight.reading, now_s)

    def _ready(self, now_s: float) -> None:
        parked, self.parked = self.parked, deque()
        for request in parked:
            self._place(request, now_s)

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
        self._failed_on[request] = self._failed_on.get(request, NOBODY) | {name}
        self._delivered[request] = delivered
        self.send(now_s + self._hop_s, self._place, request)

    def _land(self, flight: Flight) -> None:
        """Its workers are free of it."""
        for worker in (flight.decode, flight.prefill if flight.reading is not None else None):
            if worker is not None:
                worker.leave(flight.slo)
                if worker.state is State.DRAINING:
                    self._end_drain(worker)

    # What engines tell; see limits.Listener.

    def prefill_started(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
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
        output -= not self.fleet.decode_first_token
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

    def reserved(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        flight: Flight = sequence.link  # type: ignore[assignment]
        flight.reserved = True
        flight.pulled = min(sequence.cached_tokens, sequence.prompt_tokens)
        flight.decode.unpromise(sequence.prompt_tokens)
        self._pull(flight, now_s)

    def chunk_done(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        flight: Flight = sequence.link  # type: ignore[assignment]
        if sequence.computed > flight.computed:
            flight.computed = sequence.computed
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
        assert flight.prefill is not None and flight.reading is not None  # noqa: PT018
        flight.prefill.engine.release(flight.reading, now_s)
        records.fill(request, flight.done_s)
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
        assert writing is not None and reading is not None and prefill is not None  # noqa: PT018
        writing.last_token_s = UNSET if self.fleet.decode_first_token else records.prefilled_s[request]
        flight.decode.engine.arrived(writing, now_s)
        prefill.engine.release(reading, now_s)
        flight.reading = None
        prefill.leave(flight.slo)
        self._end_drain(prefill)

    def finished(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        self._finish(sequence.link, now_s, sequence.over)

    def _finish(self, flight: Any, now_s: float, over: int) -> None:
        records, request = self.records, flight.request
        records.end_s[request] = now_s
        records.over[request] += over
        records.finished += 1
        del self.flights[request]
        self._land(flight)
        self._over(request, now_s)
