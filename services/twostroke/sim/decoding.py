"""The answers that an engine writes: their contexts, the blocks they grow into, the gaps between their tokens.

Nothing here takes time per sequence and step: contexts are summed, and sequences are counted by the step, modulo the
block size, in which they need their next block.
"""

from __future__ import annotations

from heapq import heappop, heappush

from twostroke.sim.blocks import BlockStore
from twostroke.sim.gaps import Gaps
from twostroke.sim.limits import Limits, Listener
from twostroke.sim.run import Run
from twostroke.sim.sequence import Sequence


class Decoding:
    """The decoding half of an engine, see engine.py."""

    __slots__ = (
        "_block",
        "_finishing",
        "_fresh",
        "_gaps",
        "_limit_s",
        "_listener",
        "_max_run",
        "_orders",
        "_over",
        "_phase",
        "_run",
        "context_sum",
        "decoding",
        "limits",
        "steps",
        "store",
    )

    def __init__(self, limits: Limits, listener: Listener, gaps: Gaps, max_run: int) -> None:
        self.limits = limits
        self.steps = 0
        """Steps that have ended."""
        self._listener = listener
        self._gaps = gaps
        self._max_run = max_run
        self._limit_s = gaps.limit_s
        self._over = 0
        """Steps so far that took longer than the limit of a good gap."""
        self._orders = 0
        self._block = limits.block_tokens

    def _empty(self) -> None:
        self.store = BlockStore(self.limits.blocks, self.limits.unit_tokens // self._block)
        self.decoding = 0
        self.context_sum = 0
        self._phase = [0] * self._block
        self._finishing: list[tuple[int, int, Sequence]] = []
        self._fresh: list[Sequence] = []
        """Joined since the last step: their gaps began elsewhere."""
        self._run = Run()

    def written(self, sequence: Sequence) -> int:
        """Tokens that a sequence has chosen since it joined, at the end of the last booked step."""
        return self.steps - sequence.joined_step if sequence.finish_step > 0 else 0

    def _decode(self, sequence: Sequence) -> None:
        self._orders += 1
        self.decoding += 1
        self.context_sum += sequence.context
        self._phase[(sequence.context - 1 - self.steps) % self._block] += 1
        sequence.joined_step = self.steps
        sequence.finish_step = self.steps + sequence.output_tokens
        sequence.over_base = self._over
        heappush(self._finishing, (sequence.finish_step, self._orders, sequence))

    def _undecode(self, sequence: Sequence) -> None:
        """Takes a sequence out of the batch and counts its blocks."""
        context = sequence.context + self.steps - sequence.joined_step
        self.decoding -= 1
        self.context_sum -= context
        self._phase[(context - 1 - self.steps) % self._block] -= 1
        assert sequence.held is not None
        sequence.held.private += -(-(context - 1) // self._block) - -(-(sequence.context - 1) // self._block)
        sequence.over += self._over - sequence.over_base
        sequence.finish_step = -1

    def _longest(self) -> int:
        """Steps until an answer finishes or blocks run short. The first step has its blocks already."""
        finishing, block = self._finishing, self._block
        while finishing[0][0] != finishing[0][2].finish_step:
            heappop(finishing)
        steps = finishing[0][0] - self.steps
        # Any `block` steps in a row take one block for every sequence.
        rounds, room = divmod(self.store.total - self.store.used, self.decoding)
        most = 1 + rounds * block
        if steps > most:
            while (room := room - self._phase[-(self.steps + most) % block]) >= 0:
                most += 1
            steps = min(steps, most)
        return steps

    def _grow(self, steps: int) -> None:
        """Books the blocks of the run's first `steps` steps."""
        run, phase, block = self._run, self._phase, self._block
        count = steps - run.grown
        if count <= 0:
            return
        rounds, rest = divmod(count, block)
        need = rounds * self.decoding
        first = self.steps + run.grown
        for step in range(first, first + rest):
            need += phase[-step % block]
        run.grown = steps
        if need:
            self.store.grow(need)

    def _book(self, steps: int) -> None:
        """Books the gaps of the run's first `steps` steps."""
        run = self._run
        if self._fresh:
            self._book_fresh(steps)
        else:
            self._gaps.add(run.first_s, run.delta_s, steps, self.decoding)
        if self._limit_s:
            self._over += (run.first_s > self._limit_s) if steps == 1 else run.longer(self._limit_s, steps)

    def _book_fresh(self, steps: int) -> None:
        """The same where sequences joined with the run: their first gaps, begun elsewhere, end with its first step."""
        run, gaps, fresh = self._run, self._gaps, self._fresh
        if self.decoding > len(fresh):
            gaps.add(run.first_s, 0.0, 1, self.decoding - len(fresh))
        if steps > 1:
            gaps.add(run.first_s + run.delta_s, run.delta_s, steps - 1, self.decoding)
        for sequence in fresh:
            self._first_gap(sequence, run.start_s + run.first_s)
        fresh.clear()

    def _first_gap(self, sequence: Sequence, end_s: float) -> None:
        """A sequence's first gap here ends, with the run's first step."""
        if sequence.last_token_s >= 0:
            gap_s = end_s - sequence.last_token_s
            self._gaps.add(gap_s, 0.0, 1, 1)
            sequence.over += 0 < self._limit_s < gap_s
        sequence.over_base = self._over + (0 < self._limit_s < self._run.first_s)
        self._listener.decode_started(sequence, self._run.start_s, end_s)
