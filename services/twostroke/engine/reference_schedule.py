"""Which requests the next step of the reference engine runs, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence

_BY_ORDER = attrgetter("order")


@dataclass(slots=True)
class Plan:
    """One step: tokens to compute per sequence. 0 means that its KV was fetched whole and was not read yet."""

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

    A waiting sequence starts when blocks for all its tokens are free; they are taken chunk by chunk, but all at once
    for what is handed over while it is computed, and for what is fetched, which runs when all of it has come. When a
    running sequence finds no block, the running sequence that is last in order loses its blocks, waits, and is computed
    again.

    give_up: called before blocks of a sequence are given back.
    """

    def __init__(
        self, pool: BlockPool, step_budget_tokens: int, max_sequences: int, give_up: Callable[[Sequence], None]
    ) -> None:
        self._pool = pool
        self._step_budget_tokens = step_budget_tokens
        self._max_sequences = max_sequences
        self._give_up = give_up
        self.waiting: list[Sequence] = []
        self.receiving: list[Sequence] = []
        """They have their blocks, and wait for KV or for a place among the running."""
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        insort(self.waiting, sequence, key=_BY_ORDER)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out and frees its blocks."""
        next(queue for queue in (self.running, self.receiving, self.waiting) if sequence in queue).remove(sequence)
        self._free(sequence)

    def take_in(self) -> None:
        """Gives blocks to what is to be fetched, as far as it is its turn."""
        nothing = Plan(0)
        while self.waiting and self.waiting[0].handoff and self._start(self.waiting[0], nothing):
            insort(self.receiving, self.waiting.pop(0), key=_BY_ORDER)

    def plan(self) -> Plan:
        """The next step; without rows when nothing can run."""
        plan = Plan(self._step_budget_tokens)
        for sequence in [each for each in self.receiving if each.handoff is None]:
            if len(self.running) < self._max_sequences:
                self.receiving.remove(sequence)
                insort(self.running, sequence, key=_BY_ORDER)
        for decoding in (True, False):
            for sequence in [running for running in self.running if running.decoding is decoding]:
                tokens = min(sequence.missing, plan.budget)
                if plan.budget and self._grow(sequence, tokens, plan):
                    plan.add(sequence, tokens)
        while self.waiting and len(self.running) < self._max_sequences and plan.budget:
            if self.waiting[0].handoff or not self._start(self.waiting[0], plan):
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
        self._free(victim)
        victim.restart()
        self.add(victim)

    def _free(self, sequence: Sequence) -> None:
        self._give_up(sequence)
        self._pool.give_back(sequence.blocks)
        sequence.blocks = []

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
        tokens = min(sequence.missing, plan.budget)
        at_once = sequence.early or sequence.handoff
        needed = pool.blocks_for(len(sequence.tokens) if at_once else sequence.computed + tokens)
        sequence.blocks = [*cached, *pool.take(needed - len(cached))]
        if not sequence.handoff:
            plan.add(sequence, tokens)
        return True
