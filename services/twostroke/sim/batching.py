"""Which sequences an engine computes in a step: prompts that are admitted and computed chunk by chunk, and answers that
join, finish or lose their blocks."""

from __future__ import annotations

from collections import deque
from heapq import heappop

from twostroke.sim.clock import exact
from twostroke.sim.decoding import Decoding
from twostroke.sim.sequence import Sequence, Stroke

_PREFILL = Stroke.PREFILL


class Batching(Decoding):
    """The batching half of an engine, see engine.py."""

    def _empty(self) -> None:
        super()._empty()
        self.changed = True
        """What placement saw of it is out of date."""
        self.waiting: deque[Sequence] = deque()
        """Prompts to compute, in order."""
        self.receiving: deque[Sequence] = deque()
        """DECODE strokes that wait for blocks."""
        self.members: dict[Sequence, None] = {}
        """Sequences that steps compute, oldest first."""
        self.pending_tokens = 0
        """Prompt tokens accepted and not yet computed."""
        self.transfers = 0
        """DECODE strokes that have blocks and no KV yet."""
        self._joining: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []

    def _schedule(self, now_s: float, admit: bool) -> bool:
        """Fills the step with chunks of prompts; False when there is room for none."""
        budget = self.limits.budget_tokens - self.decoding
        chunks: list[tuple[Sequence, int]] = []
        tokens, pairs = 0, 0.0
        for sequence in self._prefilling:
            if not budget:
                break
            new = _chunk_tokens(sequence, budget)
            budget -= new
            tokens += new
            pairs += new * (2 * sequence.computed + new) / 2
            chunks.append((sequence, new))
        while admit and budget and self.waiting and len(self.members) < self.limits.sequences:
            sequence = self.waiting[0]
            if not self._admit(sequence):
                break
            self.waiting.popleft()
            self._prefilling.append(sequence)
            new = _chunk_tokens(sequence, budget)
            budget -= new
            tokens += new
            pairs += new * (2 * sequence.computed + new) / 2
            chunks.append((sequence, new))
            self._listener.prefill_started(self, sequence, now_s)
        if not chunks:
            return False
        self._chunks = chunks
        run = self._run
        run.steps = 1
        run.delta_s = 0.0
        run.first_s = exact(self.limits.model.batch_s(self.decoding, self.context_sum, tokens, pairs, len(chunks)))
        return True

    def _admit(self, sequence: Sequence) -> bool:
        """Takes blocks for a whole prompt, what the prefix cache has of it included."""
        hits, unit = 0, self.limits.unit_tokens
        if unit and sequence.hashes:
            # At least one token is computed, or there would be none to choose from.
            hits = min(self.store.hits(sequence.hashes), (sequence.prompt_tokens - 1) // unit)
        blocks = -(-sequence.prompt_tokens // self._block)
        if not self.store.fits(sequence.hashes, hits, blocks):
            return False
        sequence.held = self.store.take(sequence.hashes, hits, blocks)
        sequence.computed = sequence.cached_tokens = hits * unit
        self.pending_tokens -= sequence.computed
        self.members[sequence] = None
        return True

    def _chunks_done(self, now_s: float) -> None:
        self.changed = True
        chunks, self._chunks = self._chunks, []
        for sequence, new in chunks:
            sequence.computed += new
            self.pending_tokens -= new
            if sequence.computed < sequence.prompt_tokens:
                if sequence.stroke is _PREFILL:
                    self._listener.chunk_done(self, sequence, now_s)
                continue
            self._prefilling.remove(sequence)
            assert sequence.held is not None
            if self.limits.unit_tokens and sequence.hashes:
                self.store.publish(sequence.held, sequence.hashes)
            if sequence.stroke is _PREFILL:
                del self.members[sequence]
                self._listener.chunk_done(self, sequence, now_s)
            else:
                self._prefilled(sequence, now_s)

    def _prefilled(self, sequence: Sequence, now_s: float) -> None:
        if sequence.last_token_s >= 0:
            gap_s = now_s - sequence.last_token_s
            self._gaps.add(gap_s, 0.0, 1, 1)
            sequence.over += 0 < self._limit_s < gap_s
        self._listener.first_token(self, sequence, now_s)
        sequence.output_tokens -= 1
        if sequence.output_tokens:
            sequence.context = sequence.prompt_tokens + 1
            self._decode(sequence)
        else:
            self._leave(sequence, now_s)

    def _join(self) -> None:
        while self._joining and len(self.members) < self.limits.sequences:
            sequence = self._joining.popleft()
            sequence.context = sequence.prompt_tokens + 1
            self.members[sequence] = None
            self._decode(sequence)
            self._fresh.append(sequence)
            self.changed = True

    def _reserve(self, now_s: float) -> None:
        """Gives blocks to DECODE strokes, in order."""
        unit = self.limits.unit_tokens
        while self.receiving:
            sequence = self.receiving[0]
            hits = self.store.hits(sequence.hashes) if unit and sequence.hashes else 0
            blocks = -(-sequence.prompt_tokens // self._block)
            if not self.store.fits(sequence.hashes, hits, blocks):
                break
            self.receiving.popleft()
            sequence.held = self.store.take(sequence.hashes, hits, blocks)
            sequence.cached_tokens = hits * unit
            self.transfers += 1
            self.changed = True
            self._listener.reserved(self, sequence, now_s)

    def _preempt(self, now_s: float) -> None:
        """The youngest sequence gives its blocks back and will be computed again, before all that wait."""
        sequence = next(reversed(self.members))
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self.pending_tokens += sequence.computed
        else:
            sequence.output_tokens = sequence.finish_step - self.steps
            sequence.prompt_tokens = sequence.context + self.steps - sequence.joined_step
            self.pending_tokens += sequence.prompt_tokens
            sequence.chunk_tokens = sequence.prompt_tokens
            self._undecode(sequence)
            if sequence in self._fresh:
                self._fresh.remove(sequence)
                # The token that it was to repeat is computed again with the prompt.
                sequence.output_tokens -= sequence.repeats
                sequence.repeats = False
            else:
                sequence.last_token_s = now_s
        assert sequence.held is not None
        del self.members[sequence]
        self.store.drop(sequence.held)
        sequence.held = None
        sequence.computed = 0
        self.waiting.appendleft(sequence)
        self.changed = True
        self._listener.preempted(sequence)

    def _finish_due(self, now_s: float) -> None:
        finishing, steps = self._finishing, self.steps
        while finishing and finishing[0][0] <= steps:
            finish_step, _, sequence = heappop(finishing)
            if finish_step == sequence.finish_step:
                self._undecode(sequence)
                self._leave(sequence, now_s)

    def _leave(self, sequence: Sequence, now_s: float) -> None:
        assert sequence.held is not None
        del self.members[sequence]
        self.store.drop(sequence.held)
        sequence.held = None
        self.changed = True
        self._listener.finished(self, sequence, now_s)


def _chunk_tokens(sequence: Sequence, budget: int) -> int:
    """What of a prompt is computed in a step that has room for so many tokens."""
    new = sequence.prompt_tokens - sequence.computed
    if new > sequence.chunk_tokens:
        new = sequence.chunk_tokens
    return new if new < budget else budget
