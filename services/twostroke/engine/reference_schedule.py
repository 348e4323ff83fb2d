"""Which requests the next step of the reference engine runs, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from operator import attrgetter

from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence

_BY_ORDER = attrgetter("order")


@dataclass(slots=True)
class Plan:
    """One step: tokens to compute per sequence. 0 means that fetched KV alone completes the sequence."""

    budget: int
    """Tokens that the step has room for."""
    rows: dict[Sequence, int] = field(default_factory=dict)

    def add(self, sequence: Sequence, tokens: int) -> None:
        self.rows[sequence] = tokens
        self.budget -= max(1, tokens)

    def drop(self, sequence: Sequence) -> None:
        tokens = self.rows.pop(sequence, None)
        if tokens is not None:
            self.budget += max(1, tokens)

    def prompt_tokens(self) -> int:
        """Tokens that count as prompt in the step's time: all but those of decoding sequences."""
        return sum(tokens for sequence, tokens in self.rows.items() if not sequence.decoding)


class Scheduler:
    """Continuous batching: decoding sequences first, then begun prompts, then waiting ones, by priority and arrival.

    A waiting sequence starts when blocks for all its tokens are free; they are taken chunk by chunk. When a running
    sequence finds no block, the running sequence that is last in order loses its blocks and waits to be computed again.
    """

    def __init__(self, pool: BlockPool, step_budget_tokens: int, max_sequences: int) -> None:
        self._pool = pool
        self._step_budget_tokens = step_budget_tokens
        self._max_sequences = max_sequences
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        insort(self.waiting, sequence, key=_BY_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out and frees its blocks."""
        (self.running if sequence in self.running else self.waiting).remove(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []

    def plan(self) -> Plan:
        """The next step; without rows when nothing can run."""
        plan = Plan(self._step_budget_tokens)
        for decoding in (True, False):
            for sequence in [running for running in self.running if running.decoding is decoding]:
                tokens = min(sequence.missing, plan.budget)
                if tokens and self._grow(sequence, tokens, plan):
                    plan.add(sequence, tokens)
        while self.waiting and len(self.running) < self._max_sequences and plan.budget:
            if not self._start(self.waiting[0], plan):
                break
            insort(self.running, self.waiting.pop(0), key=_BY_ORDER)
        return plan

    def _grow(self, sequence: Sequence, tokens: int, plan: Plan) -> bool:
        """Blocks for so many more tokens; False when the sequence itself had to give way, now or before."""
        if sequence not in self.running:
            return False
        needed = self._pool.blocks_for(sequence.computed + tokens) - len(sequence.blocks)
        while not self._pool.can_take((), needed):
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        sequence.blocks += self._pool.take(needed)
        return True

    def _preempt(self, victim: Sequence, plan: Plan) -> None:
        plan.drop(victim)
        self.running.remove(victim)
        self._pool.give_back(victim.blocks)
        victim.restart()
        self.add(victim)

    def _start(self, sequence: Sequence, plan: Plan) -> bool:
        pool = self._pool
        full = sequence.reusable_tokens() // pool.block_size_tokens
        cached = pool.cached(sequence.prefix_keys(pool.block_size_tokens, 0, full))
        if not pool.can_take(cached, pool.blocks_for(len(sequence.tokens)) - len(cached)):
            return False
        pool.share(cached)
        sequence.fetch_from = len(cached)
        sequence.computed = len(cached) * pool.block_size_tokens
        if not sequence.reported:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_tokens)
            sequence.computed_tokens = 0
        if sequence.handoff:
            sequence.computed = sequence.prompt_tokens
        tokens = min(sequence.missing, plan.budget)
        new = pool.blocks_for(sequence.computed + tokens) - len(cached)
        sequence.blocks = [*cached, *pool.take(new)]
        plan.add(sequence, tokens)
        return True
