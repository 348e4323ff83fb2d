"""Which requests the next step of the reference engine runs, and how many tokens of each."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import attrgetter

from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence
from twostroke.policy.step_model import StepBatch, chunk_pairs
from twostroke.policy.turns import divide

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

    def batch(self) -> StepBatch:
        """What the step computes; before it is carried out. All but decoding sequences' tokens count as prompt."""
        chunks = [(sequence, tokens) for sequence, tokens in self.rows.items() if tokens and not sequence.decoding]
        others = [sequence for sequence, tokens in self.rows.items() if not tokens or sequence.decoding]
        return StepBatch(
            sequences=len(others),
            context_tokens=sum(len(sequence.tokens) for sequence in others),
            prefill_tokens=sum(tokens for _, tokens in chunks),
            prefill_pairs=sum(chunk_pairs(sequence.computed, tokens) for sequence, tokens in chunks),
            prefill_chunks=len(chunks),
        )


class Scheduler:
    """Continuous batching: what needs one token first, then prompts, which share the step by `turns.divide`.

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
        if not sequence.handoff:
            full = sequence.reusable_tokens() // self._pool.block_size_tokens
            cached = self._pool.cached(sequence.prefix_keys(self._pool.block_size_tokens, 0, full))
            sequence.expected_cached_tokens = len(cached) * self._pool.block_size_tokens
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
        for sequence in [running for running in self.running if running.missing <= 1]:
            if plan.budget and self._grow(sequence, sequence.missing, plan):
                plan.add(sequence, sequence.missing)
        self._plan_prompts(plan)
        return plan

    def _plan_prompts(self, plan: Plan) -> None:
        # What is to be fetched keeps its place: nothing that came later starts while it waits for blocks.
        waiting = takewhile(lambda each: not each.handoff, self.waiting)
        there = sorted([*(running for running in self.running if running.missing > 1), *waiting], key=_BY_ORDER)
        prompts = [each.prompt(self._pool.block_size_tokens) for each in there]
        places = self._max_sequences - len(self.running)
        # Those that run are to find the memory that they need yet.
        needed = sum(self._pool.blocks_for(len(each.tokens)) - len(each.blocks) for each in there if each.blocks)
        for index, tokens in divide(prompts, plan.budget, places, self._pool.free_blocks - needed):
            sequence = there[index]
            if prompts[index].blocks is None:
                if tokens and self._grow(sequence, tokens, plan):
                    plan.add(sequence, tokens)
            elif tokens and self._start(sequence, plan, tokens):
                self.waiting.remove(sequence)
                insort(self.running, sequence, key=_BY_ORDER)

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

    def _start(self, sequence: Sequence, plan: Plan, tokens: int = 0) -> bool:
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
        tokens = min(sequence.missing, tokens)
        at_once = sequence.early or sequence.handoff
        needed = pool.blocks_for(len(sequence.tokens) if at_once else sequence.computed + tokens)
        sequence.blocks = [*cached, *pool.take(needed - len(cached))]
        if not sequence.handoff:
            plan.add(sequence, tokens)
        return True
