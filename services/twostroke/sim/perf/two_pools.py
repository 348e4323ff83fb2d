"""Closed-loop runs on a prefill and a decode pool, in time: unlike in one pool, who meets whom hangs on the durations.

Prefill workers take prompts in the order of arrival, as many as fit a step. Decode workers run all they hold, up to
their batch; a request joins at the end of the step under way.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from twostroke.policy.step_model import StepBatch, StepModel, chunk_pairs


@dataclass(frozen=True, slots=True)
class Pools:
    """prefill_budget_tokens: of a prefill step. decode_batch: requests of a decode worker, at most.

    transfer_s: of a prompt of so many tokens, after its prefill.
    """

    prefill: StepModel
    prefill_workers: int
    prefill_budget_tokens: int
    decode: StepModel
    decode_workers: int
    decode_batch: int
    transfer_s: Callable[[int], float]


@dataclass(slots=True)
class _Decode:
    """A decode worker. since_s: end of its last step that changed who runs; token: which plan its event belongs to."""

    since_s: float = 0.0
    context: int = 0
    steps: int = 0
    plan: int = 0
    running: list[tuple[int, int]] = field(default_factory=list)  # (step after which it ends, request)
    joining: deque[int] = field(default_factory=deque)
    waiting: deque[int] = field(default_factory=deque)


@dataclass(slots=True)
class _Simulation:
    pools: Pools
    lengths: Sequence[tuple[int, int]]
    events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    order: itertools.count[int] = field(default_factory=itertools.count)
    queue: deque[int] = field(default_factory=deque)
    sent: int = 0

    def __post_init__(self) -> None:
        count = len(self.lengths)
        self.sent_s, self.first_s, self.last_s = [0.0] * count, [0.0] * count, [0.0] * count
        self.idle = self.pools.prefill_workers
        self.workers = [_Decode() for _ in range(self.pools.decode_workers)]

    sent_s: list[float] = field(init=False)
    first_s: list[float] = field(init=False)
    last_s: list[float] = field(init=False)
    idle: int = field(init=False)
    workers: list[_Decode] = field(init=False)

    def at(self, time_s: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (time_s, next(self.order), call))

    def send(self, now_s: float) -> None:
        if self.sent < len(self.lengths):
            self.sent_s[self.sent] = now_s
            self.queue.append(self.sent)
            self.sent += 1
            self.start_prefill(now_s)

    def start_prefill(self, now_s: float) -> None:
        while self.idle and self.queue:
            taken = [self.queue.popleft()]
            tokens = self.lengths[taken[0]][0]
            while self.queue and tokens + self.lengths[self.queue[0]][0] <= self.pools.prefill_budget_tokens:
                taken.append(self.queue.popleft())
                tokens += self.lengths[taken[-1]][0]
            pairs = sum(chunk_pairs(0, self.lengths[each][0]) for each in taken)
            self.idle -= 1
            took_s = self.pools.prefill.step_s(StepBatch(0, 0, tokens, pairs, len(taken)))
            self.at(now_s + took_s, lambda end_s, taken=taken: self.end_prefill(end_s, taken))  # type: ignore[misc]

    def end_prefill(self, now_s: float, taken: list[int]) -> None:
        self.idle += 1
        for request in taken:
            self.first_s[request] = now_s
            arrives_s = now_s + self.pools.transfer_s(self.lengths[request][0])
            self.at(arrives_s, lambda time_s, request=request: self.arrive(time_s, request))  # type: ignore[misc]
        self.start_prefill(now_s)

    def arrive(self, now_s: float, request: int) -> None:
        worker = min(self.workers, key=lambda each: len(each.running) + len(each.joining) + len(each.waiting))
        if len(worker.running) + len(worker.joining) >= self.pools.decode_batch:
            worker.waiting.append(request)
            return
        worker.joining.append(request)
        if len(worker.joining) == 1:
            self.plan(worker, now_s)

    def plan(self, worker: _Decode, now_s: float) -> None:
        """Sets the worker's next event: the end of the step under way if someone joins, else its next finish."""
        worker.plan += 1
        if not worker.running:
            self.change(max(now_s, worker.since_s), worker, 0)
            return
        base_s, slope_s = self.pools.decode.decode_terms(len(worker.running))
        count = worker.running[0][0] - worker.steps
        if worker.joining:
            passed, first_s = now_s - worker.since_s, base_s + slope_s * worker.context
            count = min(count, max(int(passed / first_s) + 1, 1))
        end_s = worker.since_s + self.run_s(worker, base_s, slope_s, count)
        plan = worker.plan
        self.at(end_s, lambda time_s: self.change(time_s, worker, count) if worker.plan == plan else None)

    @staticmethod
    def run_s(worker: _Decode, base_s: float, slope_s: float, count: int) -> float:
        grown = worker.context + len(worker.running) * (count - 1) / 2
        return count * (base_s + slope_s * grown)

    def change(self, now_s: float, worker: _Decode, count: int) -> None:
        worker.context += len(worker.running) * count
        worker.steps += count
        worker.since_s = now_s
        while worker.running and worker.running[0][0] <= worker.steps:
            _, request = heapq.heappop(worker.running)
            worker.context -= sum(self.lengths[request])
            self.last_s[request] = now_s
            self.at(now_s, self.send)
            if worker.waiting:
                worker.joining.append(worker.waiting.popleft())
        while worker.joining:
            request = worker.joining.popleft()
            prompt, output = self.lengths[request]
            worker.context += prompt + 1
            heapq.heappush(worker.running, (worker.steps + output - 1, request))
        if worker.running:
            self.plan(worker, now_s)


def closed_loop(pools: Pools, lengths: Sequence[tuple[int, int]], users: int) -> tuple[list[float], list[float]]:
    """(time to first token, mean time between tokens) per request, seconds. lengths: in the order of sending."""
    run = _Simulation(pools, lengths)
    for _ in range(users):
        run.send(0.0)
    while run.events:
        time_s, _, call = heapq.heappop(run.events)
        call(time_s)
    ttft_s = [first - sent for first, sent in zip(run.first_s, run.sent_s, strict=True)]
    tpot_s = [
        (last - first) / (output - 1) for last, first, (_, output) in zip(run.last_s, run.first_s, lengths, strict=True)
    ]
    return ttft_s, tpot_s
