"""The synchronous heart of the reference engine: requests, blocks, holds, and the carrying out of planned steps."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke.engine.base import EngineLoad, EngineOutput, Stroke
from twostroke.engine.fault_plan import FaultPlan
from twostroke.engine.reference_handoff import Holds, fetch
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sampling import choose, finish_of, logprobs
from twostroke.engine.reference_schedule import Plan, Scheduler
from twostroke.engine.reference_sequence import Sequence
from twostroke.engine.reference_step import compute_chunk, compute_decodes
from twostroke.errors import TwostrokeError
from twostroke.v1.kv_pb2 import Handoff


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
    kv_received_bytes: int = 0
    kv_received_handoffs: int = 0
    handoffs: int = 0


class Core:
    """Every admitted request is in `sequences` and in the scheduler until it is done; holds outlive their requests."""

    def __init__(
        self,
        pool: BlockPool,
        scheduler: Scheduler,
        holds: Holds,
        faults: FaultPlan,
        limits: Limits,
        *,
        clock: Callable[[], float],
        verify: bool,
        folder: Path,
    ) -> None:
        self.pool = pool
        self.scheduler = scheduler
        self.holds = holds
        self.sequences: dict[str, Sequence] = {}
        self.counters = Counters()
        self._faults = faults
        self._limits = limits
        self._clock = clock
        self._verify = verify
        self._folder = folder

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

    def load(self) -> EngineLoad:
        """Where the engine stands now."""
        counters = self.counters
        return EngineLoad(
            waiting_requests=len(self.scheduler.waiting),
            running_requests=len(self.scheduler.running),
            pending_prompt_tokens=sum(sequence.pending_prompt_tokens for sequence in self.sequences.values()),
            used_blocks=self.pool.used_blocks,
            held_handoffs=len(self.holds),
            kv_received_bytes=counters.kv_received_bytes,
            kv_received_handoffs=counters.kv_received_handoffs,
            computed_prompt_tokens=counters.computed_prompt_tokens,
            generated_tokens=counters.generated_tokens,
            steps=counters.steps,
        )

    def carry_out(self, plan: Plan) -> list[EngineOutput]:
        """Computes a step: KV, then tokens, then what ends with them."""
        self.counters.steps += 1
        outputs = []
        hashes: list[tuple[Sequence, int]] = []
        prompts = [(sequence, tokens) for sequence, tokens in plan.rows.items() if not sequence.decoding]
        decoding = [sequence for sequence in plan.rows if sequence.decoding]
        if decoding:
            hashes += zip(decoding, compute_decodes(decoding, self.pool), strict=True)
        for sequence, tokens in prompts:
            try:
                hash_ = self._read_prompt(sequence, tokens)
            except TwostrokeError as error:
                outputs.append(EngineOutput(sequence.request_id, failure=error, done=True))
                continue
            if hash_ is not None:
                hashes.append((sequence, hash_))
        now_s = self._clock()
        outputs += [self._advance(sequence, hash_, now_s) for sequence, hash_ in hashes]
        self.cancel([output.request_id for output in outputs if output.done])
        return outputs

    def _read_prompt(self, sequence: Sequence, tokens: int) -> int | None:
        """Fetches what is on offer, computes so many tokens. Returns the next token's hash once none is missing."""
        if sequence.handoff is not None:
            copied = fetch(sequence, sequence.handoff, self.pool, verify=self._verify, folder=self._folder)
            sequence.handoff = None
            self.counters.kv_received_bytes += copied
            self.counters.kv_received_handoffs += 1
        before = sequence.computed_tokens
        hash_ = compute_chunk(sequence, tokens, self.pool)
        self.counters.computed_prompt_tokens += sequence.computed_tokens - before
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
            output.handoff = self._offer(sequence)
        output.done = output.finish is not None or output.handoff is not None
        return output

    def _offer(self, sequence: Sequence) -> Handoff:
        handoff = self.holds.offer(sequence)
        self.counters.handoffs += 1
        for fault in self._faults.corruptions(self.counters.handoffs):
            block = handoff.shm.block_ids[min(fault.block, handoff.blocks - 1)]
            content = self.pool.segment.words[block].view(np.uint8)
            content[fault.byte % len(content)] ^= 1
            # The fault is of this hand-off only: nobody else is to compute with the block.
            self.pool.forget(block)
        return handoff
