"""The synchronous heart of the reference engine: requests, blocks, holds, and the carrying out of planned steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass

from twostroke.engine.base import EngineLoad, EngineOutput, Stroke
from twostroke.engine.reference_handoff import Holds
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_receive import Inbox
from twostroke.engine.reference_sampling import choose, finish_of, logprobs
from twostroke.engine.reference_schedule import Plan, Scheduler
from twostroke.engine.reference_sequence import Sequence
from twostroke.engine.reference_step import compute_chunk, compute_decodes
from twostroke.errors import KvLostError, TwostrokeError


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the sequences of an engine."""

    vocab_size: int
    max_model_len_tokens: int
    block_size_tokens: int


@dataclass(slots=True)
class Counters:
    """Sums since the engine's start."""

    steps: int = 0
    generated_tokens: int = 0
    computed_prompt_tokens: int = 0


class Core:
    """Every admitted request is in `sequences` and in the scheduler until it is done; holds outlive their requests."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        holds: Holds,
        inbox: Inbox,
        limits: Limits,
        *,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.holds = holds
        self.inbox = inbox
        self.sequences: dict[str, Sequence] = {}
        self.counters = Counters()
        self._limits = limits
        self._clock = clock
        self._lost: dict[str, KvLostError] = {}

    def add(self, sequence: Sequence) -> None:
        """Queues a request."""
        self.sequences[sequence.request_id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, request_ids: Ids[str]) -> list[Sequence]:
        """Ends requests and frees their blocks. Returns those that were there."""
        found = [self.sequences.pop(request_id) for request_id in set(request_ids) if request_id in self.sequences]
        for sequence in found:
            self.scheduler.remove(sequence)
        return found

    def drop_peer(self, worker_id: str, epoch: str) -> None:
        """Fails, with the next `receive`, whatever waits for the KV of an epoch that is over."""
        for sequence in self.sequences.values():
            handoff = sequence.handoff
            if handoff and (handoff.source_worker_id, handoff.source_epoch) == (worker_id, epoch):
                self._lost[sequence.request_id] = KvLostError(f"epoch {epoch} of worker {worker_id} is over")

    @property
    def receives(self) -> bool:
        """Whether KV is on its way."""
        return any(sequence.handoff for sequence in self.scheduler.receiving)

    def receive(self) -> list[EngineOutput]:
        """Fetches the KV that is ready. Returns the failures."""
        failures: dict[str, TwostrokeError] = {key: error for key, error in self._lost.items() if key in self.sequences}
        self._lost = {}
        self.scheduler.take_in()
        for sequence in self.scheduler.receiving:
            if sequence.handoff is not None and sequence.request_id not in failures:
                try:
                    self.inbox.poll(sequence, sequence.handoff)
                except TwostrokeError as error:
                    failures[sequence.request_id] = error
        self.cancel(list(failures))
        return [EngineOutput(request_id, failure=error, done=True) for request_id, error in failures.items()]

    def load(self) -> EngineLoad:
        """Where the engine stands now."""
        counters = self.counters
        pending = [sequence.pending_prompt_tokens for sequence in self.sequences.values()]
        return EngineLoad(
            waiting_requests=len(self.scheduler.waiting) + len(self.scheduler.receiving),
            running_requests=len(self.scheduler.running),
            pending_prompt_tokens=sum(pending),
            pending_prompts=sum(tokens > 0 for tokens in pending),
            used_blocks=self.pool.used_blocks,
            held_handoffs=len(self.holds),
            held_blocks=self.holds.blocks,
            kv_received_bytes=self.inbox.received_bytes,
            kv_received_handoffs=self.inbox.received_handoffs,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            steps=counters.steps,
        )

    def carry_out(self, plan: Plan) -> list[EngineOutput]:
        """Computes a step: KV, then tokens, then what ends with them."""
        self.counters.steps += 1
        hashes: list[tuple[Sequence, int]] = []
        prompts = [(sequence, tokens) for sequence, tokens in plan.rows.items() if not sequence.decoding]
        decoding = [sequence for sequence in plan.rows if sequence.decoding]
        if decoding:
            hashes += zip(decoding, compute_decodes(decoding, self.pool), strict=True)
        for sequence, tokens in prompts:
            hash_ = self._read_prompt(sequence, tokens)
            if hash_ is not None:
                hashes.append((sequence, hash_))
        now_s = self._clock()
        outputs = [self._advance(sequence, hash_, now_s) for sequence, hash_ in hashes]
        self.cancel([output.request_id for output in outputs if output.done])
        return outputs

    def _read_prompt(self, sequence: Sequence, tokens: int) -> int | None:
        """Computes so many tokens. Returns the next token's hash once none is missing."""
        before = sequence.computed_tokens
        hash_ = compute_chunk(sequence, tokens, self.pool)
        self.counters.computed_prompt_tokens += sequence.computed_tokens - before
        self.holds.advance(sequence)
        return hash_

    def _advance(self, sequence: Sequence, hash_: int, now_s: float) -> EngineOutput:
        """Chooses the next token of a sequence and finds out whether that ends it here."""
        rules, limits = sequence.rules, self._limits
        token = choose(hash_, rules, sequence.tokens, sequence.prompt_tokens)
        sequence.tokens.append(token)
        self.counters.generated_tokens += 1
        output = EngineOutput(sequence.request_id, token_ids=(token,))
        if rules.logprobs is not None:
            output.logprobs = logprobs(hash_, token, rules.logprobs, limits.vocab_size)
        if not sequence.reported:
            sequence.reported = True
            output.started = not sequence.announced
            output.prompt = sequence.prompt_stats(now_s)
        length = len(sequence.tokens)
        output.finish = finish_of(rules, token, sequence.generated, length, limits.max_model_len_tokens)
        if output.finish is None and sequence.stroke is Stroke.PREFILL:
            output.handoff = self.holds.complete(sequence, token)
        output.done = output.finish is not None or output.handoff is not None
        return output
