"""Closed-loop runs, exactly: so many users, each sending the next request when the last one is answered.

A published throughput run is such a loop. Which requests share which steps then depends on lengths and scheduler alone,
not on how long a step takes. So a run is scheduled once, in steps, and any step model is laid over the schedule
afterwards; many equal decode steps count as one entry.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostroke.policy.step_model import chunk_pairs
from twostroke.sim.perf.load import Scheduler, Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Schedule:
    """A run in steps. Entry i stands for steps[i] equal steps.

    sequences, context (sum, mean over the entry's steps), prefill tokens, pairs and chunks: of one step of the entry.
    arrived, first, last: per request, the entries at whose end it was sent (-1: at the start), gave its first and its
    last token. outputs: tokens per request.
    """

    steps: Floats
    sequences: Floats
    context: Floats
    prefill_tokens: Floats
    prefill_pairs: Floats
    prefill_chunks: Floats
    arrived: NDArray[np.int64]
    first: NDArray[np.int64]
    last: NDArray[np.int64]
    outputs: Floats
    inputs: Floats

    def times(self, base_s: Floats, context_token_s: Any) -> tuple[Floats, Floats, Floats]:
        """(time to first token, mean time between tokens) per request and the run's length, seconds.

        base_s: of one step of each entry but for its decode context, entries last; further dimensions, as of several
        variants of a model, come first in the results too.
        """
        ends = np.cumsum(self.steps * (base_s + context_token_s * self.context), axis=-1)
        ends = np.concatenate([ends, np.zeros((*ends.shape[:-1], 1))], axis=-1)
        first = ends[..., self.first]
        return first - ends[..., self.arrived], (ends[..., self.last] - first) / (self.outputs - 1), ends[..., -2]


@dataclass(slots=True)
class _Request:
    index: int
    prompt: int  # tokens to prefill, those of a put-back request's output included
    left: int  # output tokens after the prefill's own
    seen: int = 0  # step from which it may be scheduled
    computed: int = 0
    context: int = 0  # valid while decoding, at `since`
    since: int = 0
    put_back: int = 0


@dataclass(slots=True)
class _Run:
    scheduler: Scheduler
    capacity: int
    lengths: Sequence[tuple[int, int]]
    waiting: deque[_Request] = field(default_factory=deque)
    unseen: deque[_Request] = field(default_factory=deque)
    running: dict[int, _Request] = field(default_factory=dict)
    finishing: list[tuple[int, int, int]] = field(default_factory=list)  # (step, request, times put back)
    entries: list[tuple[float, ...]] = field(default_factory=list)
    step: int = 0
    context: int = 0
    prefilling: _Request | None = None
    held_since: int = -1
    sent: int = 0
    kv: int = 0  # tokens reserved
    arrived: list[int] = field(init=False)
    first: list[int] = field(init=False)
    last: list[int] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.lengths)
        self.arrived, self.first, self.last = [-1] * count, [0] * count, [0] * count

    def send(self, seen: int) -> None:
        if self.sent < len(self.lengths):
            prompt, output = self.lengths[self.sent]
            self.arrived[self.sent] = len(self.entries) - 1
            self.unseen.append(_Request(self.sent, prompt, output - 1, seen))
            self.sent += 1

    def need(self, request: _Request) -> int:
        return request.prompt + (request.left if self.scheduler.reserve_output else 0)

    def advance(self) -> bool:
        """One entry. False when nothing is left."""
        rules = self.scheduler
        busy = bool(self.running) or self.prefilling is not None or bool(self.waiting)
        if self.unseen and not busy:
            self.step = max(self.step, self.unseen[0].seen)
        if not busy or self.step % rules.poll_steps == 0:
            while self.unseen and self.unseen[0].seen <= self.step:
                self.waiting.append(self.unseen.popleft())
        chunks = self._chunks()
        if not chunks and not self.running:
            return bool(self.unseen)
        if chunks:
            self._prefill_step(chunks)
        else:
            self._decode_steps()
        return True

    def _admits(self, request: _Request, admitted: int, taken: int) -> bool:
        room = len(self.running) + admitted < self.scheduler.max_sequences
        used = self.kv if self.scheduler.reserve_output else self.context
        fits = used + taken + self.need(request) <= self.capacity
        return room and (fits or (not self.running and not admitted))

    def _chunks(self) -> list[tuple[_Request, int]]:
        rules = self.scheduler
        budget = rules.budget_tokens - (0 if rules.exclusive else len(self.running))
        found: list[tuple[_Request, int]] = []
        taken = 0
        if self.prefilling is not None:
            size = min(self.prefilling.prompt - self.prefilling.computed, max(budget, 1))
            found.append((self.prefilling, size))
            taken += self.need(self.prefilling)
            budget -= size
        if rules.hold_steps and self.running and not found and self._hold(budget):
            return []
        while self.waiting and budget > 0 and self._admits(self.waiting[0], len(found), taken):
            request = self.waiting[0]
            if request.prompt > budget and not rules.chunked and found:
                break
            size = min(request.prompt, budget) if rules.chunked else request.prompt
            found.append((self.waiting.popleft(), size))
            taken += self.need(request)
            budget -= size
            if size < request.prompt:
                break
        return found

    def _hold(self, budget: int) -> bool:
        """Whether the prompts that wait should go on waiting for more."""
        if not self.waiting:
            self.held_since = -1
            return False
        if self.held_since < 0:
            self.held_since = self.step
        ready = sum(each.prompt for each in self.waiting) >= min(self.scheduler.hold_tokens, budget)
        if ready or self.step - self.held_since >= self.scheduler.hold_steps:
            self.held_since = -1
            return False
        return True

    def _prefill_step(self, chunks: list[tuple[_Request, int]]) -> None:
        decodes = 0 if self.scheduler.exclusive else len(self.running)
        pairs = sum(chunk_pairs(request.computed, size) for request, size in chunks)
        tokens = sum(size for _, size in chunks)
        self._entry(1, decodes, self.context if decodes else 0, tokens, pairs, len(chunks))
        if self.scheduler.exclusive:
            # Decodes stood still: their last steps move by one.
            self.finishing = [(step + 1, index, times) for step, index, times in self.finishing]
            for request in self.running.values():
                request.since += 1
        else:
            self.context += decodes
        self.step += 1
        if not self.scheduler.exclusive:
            self._finish()
        self.prefilling = None
        for request, size in chunks:
            request.computed += size
            if request.computed < request.prompt:
                self.prefilling = request
            else:
                self._start_decode(request)

    def _start_decode(self, request: _Request) -> None:
        if not request.put_back:
            self.first[request.index] = len(self.entries) - 1
        request.context, request.since = request.prompt + 1, self.step
        self.kv += self.need(request)
        self.context += request.context
        self.running[request.index] = request
        heapq.heappush(self.finishing, (self.step + request.left, request.index, request.put_back))

    def _decode_steps(self) -> None:
        count = self._next_finish() - self.step
        sequences = len(self.running)
        if self.unseen:
            poll = self.scheduler.poll_steps
            due = max(self.unseen[0].seen, self.step + 1)
            count = min(count, -(-due // poll) * poll - self.step)
        if self.held_since >= 0:
            count = min(count, self.scheduler.hold_steps - (self.step - self.held_since))
        if not self.scheduler.reserve_output and sequences > 1:
            while self.context + sequences > self.capacity and sequences > 1:
                self._put_back_youngest()
                sequences = len(self.running)
            count = min(count, max((self.capacity - self.context) // sequences, 1), self._next_finish() - self.step)
        count = max(count, 1)
        self._entry(count, sequences, self.context + sequences * (count - 1) / 2, 0, 0.0, 0)
        self.step += count
        self.context += sequences * count
        self._finish()

    def _next_finish(self) -> int:
        while True:
            step, index, times = self.finishing[0]
            request = self.running.get(index)
            if request is not None and request.put_back == times:
                return step
            heapq.heappop(self.finishing)

    def _put_back_youngest(self) -> None:
        index = next(reversed(self.running))
        request = self.running.pop(index)
        grown = self.step - request.since
        self.context -= request.context + grown
        self.kv -= self.need(request)
        request.prompt, request.left = request.context + grown, request.left - grown
        request.computed, request.put_back = 0, request.put_back + 1
        self.waiting.appendleft(request)

    def _finish(self) -> None:
        while self.running and self._next_finish() <= self.step:
            _, index, _ = heapq.heappop(self.finishing)
            request = self.running.pop(index)
            self.context -= request.context + self.step - request.since
            self.kv -= self.need(request)
            self.last[index] = len(self.entries) - 1
            self.send(self.step + self.scheduler.late_steps)

    def _entry(self, *values: float) -> None:
        self.entries.append(values)


def schedule(workload: Workload, scheduler: Scheduler, capacity_tokens: int) -> Schedule:
    """Schedules a run. capacity_tokens: of KV; a request that alone exceeds it is run alone all the same."""
    lengths = workload.lengths()
    run = _Run(scheduler, capacity_tokens, lengths)
    for user in range(workload.concurrency):
        run.send(user // workload.ramp if workload.ramp else 0)
    while run.advance():
        pass
    steps, sequences, context, tokens, pairs, chunks = np.array(run.entries, dtype=float).T
    return Schedule(
        steps=steps,
        sequences=sequences,
        context=context,
        prefill_tokens=tokens,
        prefill_pairs=pairs,
        prefill_chunks=chunks,
        arrived=np.array(run.arrived),
        first=np.array(run.first),
        last=np.array(run.last),
        outputs=np.array([output for _, output in lengths], dtype=float),
        inputs=np.array([prompt for prompt, _ in lengths], dtype=float),
    )
