"""Which sequences an engine computes in a step: prompts that are admitted and computed chunk by chunk, and answers that
join, finish or lose their blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from heapq import heappop

from twostroke.policy.turns import CERTAIN, SPARE_TOKENS, ShortPrompts, beside_tokens, room_within, size_class
from twostroke.sim.clock import exact
from twostroke.sim.decoding import Decoding
from twostroke.sim.gaps import Gaps
from twostroke.sim.limits import Limits, Listener
from twostroke.sim.sequence import Sequence, Stroke

_PREFILL = Stroke.PREFILL


class Batching(Decoding):
    """The batching half of an engine, see engine.py.

    shortest_first: prompts take turns as policy/turns.py divides a step, which is what our workers do; else the oldest
    has all that it can use, as in plain vLLM.
    """

    def __init__(self, limits: Limits, listener: Listener, gaps: Gaps, max_run: int, *, shortest_first: bool) -> None:
        super().__init__(limits, listener, gaps, max_run)
        self._shortest_first = shortest_first
        self.company = 0
        """Engines of the same machine that compute: without any its steps may use their cores, else they share what
        there is."""
        self._ages = 0

    def _empty(self) -> None:
        super()._empty()
        self.busy = False
        """A step is under way."""
        self.changed = True
        """What placement saw of it is out of date."""
        self.waiting: list[tuple[int, Sequence]] = []
        """Prompts to compute, with their ages, oldest first."""
        self._by_length: list[tuple[int, int, Sequence]] = []
        """The same with the classes of their lengths, shortest first."""
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
        self._shorts = ShortPrompts()

    def _schedule(self, now_s: float, admit: bool) -> bool:
        """Fills the step with chunks of prompts; False when there is room for none."""
        limits = self.limits
        budget = limits.budget_tokens - self.decoding
        most_s, by_length = limits.most_step_s, self._by_length
        if most_s and self._shorts.come(now_s, by_length[0][2].seen_tokens if by_length else None, budget):
            depth = max((each.computed for each in self._prefilling), default=0)
            budget = room_within(most_s, budget, limits.model, self.decoding, self.context_sum, depth)
        chunks = (self._shares if self._shortest_first else self._in_order)(budget, admit, now_s)
        if not chunks:
            return False
        self._chunks = chunks
        tokens, pairs = 0, 0.0
        for sequence, new in chunks:
            tokens += new
            pairs += new * (2 * sequence.computed + new) / 2
        run = self._run
        run.steps = 1
        run.delta_s = 0.0
        model = limits.model
        if (limits.spare_model or limits.busy_model) is not None:
            if self.company:
                model = limits.busy_model or model
            elif tokens >= SPARE_TOKENS:
                model = limits.spare_model or model
        run.first_s = exact(model.batch_s(self.decoding, self.context_sum, tokens, pairs, len(chunks)))
        return True

    def _in_order(self, budget: int, admit: bool, now_s: float) -> list[tuple[Sequence, int]]:
        """The oldest first, with all that they can use."""
        chunks: list[tuple[Sequence, int]] = []
        for sequence in self._prefilling:
            if not budget:
                break
            new = _chunk_tokens(sequence, budget)
            budget -= new
            chunks.append((sequence, new))
        while admit and budget and self.waiting and self._let_in(self.waiting[0][1], now_s):
            sequence = self._prefilling[-1]
            new = _chunk_tokens(sequence, budget)
            budget -= new
            chunks.append((sequence, new))
        return chunks

    def _shares(self, budget: int, admit: bool, now_s: float) -> list[tuple[Sequence, int]]:
        """As policy/turns.py divides."""
        if not budget:
            return []
        waiting = self._by_length if admit else []
        oldest = min(self._prefilling, key=_age, default=None)
        if waiting and (oldest is None or self.waiting[0][0] < oldest.age):
            oldest = self.waiting[0][1]
            if not self._let_in(oldest, now_s):
                oldest, waiting = None, []
        kept = 0
        if oldest is not None:
            limit = min(budget, oldest.chunk_tokens) if oldest.chunk_tokens < oldest.prompt_tokens else budget
            kept = min(oldest.prompt_tokens - oldest.computed, -(-limit // CERTAIN))
        chunks: list[tuple[Sequence, int]] = []
        begun = sorted((_left(each), each.age, each) for each in self._prefilling)
        given, beside, here, there, ends, full = kept, beside_tokens(budget) - kept, 0, 0, False, False
        while here < len(begun) or there < len(waiting):
            begins = here == len(begun) or (there < len(waiting) and waiting[there] < begun[here])
            sequence = waiting[there][2] if begins else begun[here][2]
            own = kept if sequence is oldest else 0
            given, beside, here = given - own, beside + own, here + (not begins)
            if full and not own:
                continue
            left = sequence.seen_tokens if begins else sequence.prompt_tokens - sequence.computed
            new = min(left, budget - given)
            if limited := sequence.chunk_tokens < sequence.prompt_tokens:
                new = min(new, max(0, sequence.chunk_tokens - given))
            if ends and new < left:
                new = min(new, beside)
            new = max(own, new)
            if not new:
                there += begins
                if not limited:
                    # Whoever is longer gets nothing either, but for the oldest.
                    full, waiting = True, []
                continue
            if begins and not self._let_in(sequence, now_s):
                waiting = []
                continue
            chunks.append((sequence, min(new, sequence.prompt_tokens - sequence.computed)))
            given += new
            ends = ends or new == left
            if new < left:
                beside = max(0, beside - new)
        return chunks

    def _enter(self, sequence: Sequence) -> None:
        """Whoever comes is the youngest."""
        self._ages += 1
        sequence.age = self._ages

    def _wait(self, sequence: Sequence) -> None:
        """Puts a prompt where its age and its length want it."""
        insort(self.waiting, (sequence.age, sequence))
        if self._shortest_first:
            insort(self._by_length, (_length(sequence), sequence.age, sequence))

    def _unwait(self, sequence: Sequence) -> None:
        """Takes a prompt out of those that wait."""
        del self.waiting[bisect_left(self.waiting, (sequence.age, sequence))]
        if self._shortest_first:
            del self._by_length[bisect_left(self._by_length, (_length(sequence), sequence.age, sequence))]

    def _let_in(self, sequence: Sequence, now_s: float) -> bool:
        """Begins with a prompt that waits; False when there is no room."""
        if len(self.members) >= self.limits.sequences or not self._admit(sequence):
            return False
        self._unwait(sequence)
        self._prefilling.append(sequence)
        self._listener.prefill_started(self, sequence, now_s)
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
            else:
                sequence.last_token_s = now_s
        assert sequence.held is not None
        del self.members[sequence]
        self.store.drop(sequence.held)
        sequence.held = None
        sequence.computed = 0
        sequence.resumed = True
        sequence.seen_tokens = sequence.prompt_tokens
        self._wait(sequence)
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


def _age(sequence: Sequence) -> int:
    return sequence.age


def _left(sequence: Sequence) -> int:
    return 0 if sequence.resumed else size_class(sequence.prompt_tokens - sequence.computed)


def _length(sequence: Sequence) -> int:
    return 0 if sequence.resumed else size_class(sequence.seen_tokens)


def _chunk_tokens(sequence: Sequence, budget: int) -> int:
    """What of a prompt is computed in a step that has room for so many tokens."""
    new = sequence.prompt_tokens - sequence.computed
    if new > sequence.chunk_tokens:
        new = sequence.chunk_tokens
    return new if new < budget else budget
