"""One worker's engine: continuous batching in steps, chunked prefill, KV blocks, preemption.

A step computes one token of every running answer, then chunks of prompts within the step's budget. Steps that only
decode are taken many at once: up to the next finish, the next shortage of blocks, or whatever reaches the worker
meanwhile. `max_run` 1 is the reference that takes every step alone; both end at the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

from twostroke.sim.batching import Batching
from twostroke.sim.gaps import Gaps
from twostroke.sim.limits import Limits, Listener
from twostroke.sim.sequence import Sequence


class Engine(Batching):
    """One replica. push(time_s, engine, version): asks for `step_end` then, unless the version has moved on."""

    def __init__(
        self,
        index: int,
        limits: Limits,
        listener: Listener,
        push: Callable[[float, Engine, int], None],
        gaps: Gaps,
        max_run: int,
        *,
        shortest_first: bool,
    ) -> None:
        super().__init__(limits, listener, gaps, max_run, shortest_first=shortest_first)
        self.index = index
        self.version = 0
        self.busy_s = 0.0
        self._push = push
        self._others: Items[Engine] = ()
        self._empty()

    def meet(self, others: Items[Engine]) -> None:
        """Which engines are on the same machine, as far as that counts."""
        self._others = others
        self.company = sum(each.busy for each in others)

    def _tell(self, more: int, now_s: float) -> None:
        """Others have more company, or less: their next steps take another time."""
        for each in self._others:
            each.company += more
            each.shorten(now_s)

    def shorten(self, now_s: float) -> None:
        """Ends the run under way with its step."""
        if self.busy and self._run.steps > 1 and self._run.truncate(now_s):
            self.version += 1
            self._push(self._run.end_s, self, self.version)

    @property
    def idle(self) -> bool:
        """Whether nothing is under way or held."""
        return not (self.busy or self.waiting or self.receiving or self._joining or self.transfers or self.store.used)

    @property
    def sequences(self) -> int:
        """Answers that are written here or will be, those that wait for KV too."""
        return len(self.members) + len(self._joining) + self.transfers + len(self.receiving)

    @property
    def pending_prompts(self) -> int:
        """Prompts that pending_tokens belong to."""
        return len(self.waiting) + len(self._prefilling)

    def hits(self, hashes: Items[int], now_s: float) -> int:
        """Leading prefix units that are cached here."""
        store, run = self.store, self._run
        found = store.hits(hashes)
        if found and run.grown < run.steps and store.spare < self.decoding * (run.steps // self._block + 1):
            # The blocks that answers grew into meanwhile may have been these.
            grown = run.grown
            self.sync(now_s)
            if run.grown > grown:
                found = store.hits(hashes)
        return found

    # What reaches the worker.

    def enqueue(self, sequence: Sequence, now_s: float) -> None:
        """Takes a WHOLE or PREFILL stroke. The caller has checked that it can ever fit."""
        self._enter(sequence)
        if self._shortest_first and (unit := self.limits.unit_tokens) and sequence.hashes:
            sequence.seen_tokens = max(1, sequence.prompt_tokens - unit * self.store.hits(sequence.hashes))
        self._wait(sequence)
        self.pending_tokens += sequence.prompt_tokens
        self._wake(now_s)

    def receive(self, sequence: Sequence, now_s: float) -> None:
        """Takes a DECODE stroke; `reserved` is told as soon as its prompt has blocks."""
        self.sync(now_s)
        self._enter(sequence)
        self.receiving.append(sequence)
        self._reserve(now_s)
        self._wake(now_s)

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        """The KV of a DECODE stroke is complete."""
        self.transfers -= 1
        self._joining.append(sequence)
        self._wake(now_s)

    def release(self, sequence: Sequence, now_s: float) -> None:
        """Frees the blocks of a PREFILL stroke that was read, or of a DECODE stroke that was given up."""
        self.sync(now_s)
        assert sequence.held is not None
        self.store.drop(sequence.held)
        sequence.held = None
        self.changed = True
        if self.receiving:
            self._reserve(now_s)
            self._wake(now_s)
        elif self.waiting:
            self._wake(now_s)

    def forget(self, sequence: Sequence, now_s: float) -> None:
        """A DECODE stroke whose KV will not come: frees what it holds or drops it from the queue."""
        if sequence.held is None:
            self.receiving.remove(sequence)
            self.sync(now_s)
            self._reserve(now_s)
            self._wake(now_s)
            return
        self.transfers -= 1
        self.release(sequence, now_s)

    def cancel(self, sequence: Sequence, now_s: float) -> None:
        """Ends a WHOLE or PREFILL stroke that waits, computes or is held. A step under way takes its time still."""
        if sequence.held is None:
            self._unwait(sequence)
            self.pending_tokens -= sequence.prompt_tokens
            self.changed = True
            return
        if sequence in self.members:
            del self.members[sequence]
            if sequence in self._prefilling:
                self._prefilling.remove(sequence)
                self.pending_tokens -= sequence.prompt_tokens - sequence.computed
                self._chunks = [chunk for chunk in self._chunks if chunk[0] is not sequence]
        self.release(sequence, now_s)

    def halt(self, now_s: float) -> None:
        """The worker dies: books the steps that ended and takes no other."""
        if self.busy:
            ended = self._run.ended(now_s)
            if ended and self.decoding:
                self._book(ended)
            self.steps += ended
            self.busy_s += now_s - self._run.start_s
            self._tell(-1, now_s)
        self.busy = False
        self.version += 1

    def clear(self) -> None:
        """Forgets everything. The caller knows whom it served."""
        self.version += 1
        self.changed = True
        self._empty()

    def sync(self, now_s: float) -> int:
        """Books the blocks that the run's steps have taken up to now. Returns the sum of the answers' contexts."""
        if not (self.busy and self.decoding):
            return self.context_sum
        ended = self._run.ended(now_s)
        if self._run.grown <= ended:
            self._grow(ended + 1)
        return self.context_sum + self.decoding * ended

    def _wake(self, now_s: float) -> None:
        self.changed = True
        if not self.busy:
            self._begin(now_s)
        else:
            self.shorten(now_s)

    # A step.

    def step_end(self, now_s: float) -> None:
        """The run under way is over: books it and begins the next."""
        run = self._run
        steps = run.steps
        self.busy_s += now_s - run.start_s
        if self.decoding:
            if run.grown < steps:
                self._grow(steps)
            self._book(steps)
            self.context_sum += self.decoding * steps
        self.steps += steps
        if self._chunks:
            self._chunks_done(now_s)
        if self._finishing and self._finishing[0][0] <= self.steps:
            self._finish_due(now_s)
        self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        if self.receiving:
            self._reserve(now_s)
        if self._joining:
            self._join()
        run, store = self._run, self.store
        run.start_s = now_s
        run.grown = 0
        preempted = False
        decoding = self.decoding
        if decoding:
            while (need := self._phase[-self.steps % self._block]) > store.total - store.used:
                self._preempt(now_s)
                preempted = True
            decoding = self.decoding
            run.grown = 1
            if need:
                store.grow(need)
        admit = not (preempted and decoding)
        if (self._prefilling or (self.waiting and admit)) and self._schedule(now_s, admit):
            self.changed = True
        elif decoding:
            limits = self.limits
            if self.company and limits.busy_model is not None:
                terms = limits.busy_terms(decoding)
            else:
                terms = limits.terms.get(decoding) or limits.decode_terms(decoding)
            run.first_s = terms[0] + terms[1] * self.context_sum
            run.delta_s = terms[1] * decoding
            # After a preemption the next step may admit what this one may not.
            run.steps = 1 if preempted or self._max_run == 1 else self._longest()
        else:
            if self.busy:
                self.busy = False
                self._tell(-1, now_s)
            return
        if not self.busy:
            self.busy = True
            self._tell(1, now_s)
        self.version += 1
        self._push(run.end_s, self, self.version)
