"""What an engine may hold, and what it tells of its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from twostroke.policy.step_model import StepBatch, StepModel, chunk_pairs
from twostroke.sim.clock import exact
from twostroke.sim.sequence import Sequence

if TYPE_CHECKING:
    from twostroke.sim.batching import Batching


class Limits:
    """Limits of one kind of replica; all of the kind share one, and with it the model's decode terms.

    blocks, block_tokens: the KV cache. budget_tokens: most tokens of a step. sequences: most of a step. unit_tokens:
    tokens of one prefix hash, a multiple of block_tokens; 0 for no prefix cache. most_step_s: how long a step with
    prompts is to take at most; 0 is no bound. spare_model: what steps with SPARE_TOKENS of prompts and more take while
    no other worker computes, whose cores these then use, too; None where they do not. busy_model: what steps take while
    others compute, whose machine is the same; None where it is their own.
    """

    __slots__ = (
        "block_tokens",
        "blocks",
        "budget_tokens",
        "busy_model",
        "model",
        "most_step_s",
        "prefill_token_s",
        "sequences",
        "spare_model",
        "spare_share",
        "terms",
        "unit_tokens",
    )

    def __init__(
        self,
        model: StepModel,
        *,
        blocks: int,
        block_tokens: int,
        budget_tokens: int,
        sequences: int,
        unit_tokens: int = 0,
        most_step_s: float = 0.0,
        spare_model: StepModel | None = None,
        busy_model: StepModel | None = None,
    ) -> None:
        self.model = model
        self.blocks = blocks
        self.block_tokens = block_tokens
        self.budget_tokens = budget_tokens
        self.sequences = min(sequences, budget_tokens)
        self.unit_tokens = unit_tokens
        self.most_step_s = most_step_s
        self.spare_model = spare_model
        self.busy_model = busy_model
        self.terms: dict[int, tuple[float, float]] = {}
        chunk = min(budget_tokens, 2048)
        self.prefill_token_s = model.step_s(StepBatch(0, 0, chunk, chunk * chunk / 2, 1)) / chunk
        """About what a prompt token takes."""
        self.spare_share = 1.0
        """Of a full step's time, what is left while others lend their cores."""
        if spare_model is not None:
            full = StepBatch(0, 0, chunk, chunk_pairs(chunk, chunk), 1)
            self.spare_share = min(1.0, spare_model.step_s(full) / model.step_s(full))

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """The model's, on the clock's grid; kept in `terms`."""
        found = self.terms[sequences] = _on_grid(self.model, sequences)
        return found

    def busy_terms(self, sequences: int) -> tuple[float, float]:
        """Those of busy_model."""
        assert self.busy_model is not None
        return _on_grid(self.busy_model, sequences)

    def fits(self, tokens: int) -> bool:
        """Whether a sequence of that length can be held at all."""
        return -(-tokens // self.block_tokens) <= self.blocks


def _on_grid(model: StepModel, sequences: int) -> tuple[float, float]:
    base_s, slope_s = model.decode_terms(sequences)
    return exact(base_s), exact(slope_s) if slope_s > 0 else 0.0


class Listener:
    """Is told what an engine does, in seconds of virtual time."""

    def prefill_started(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        """The first chunk of a prompt begins; again after a preemption."""

    def chunk_done(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        """A chunk of a PREFILL stroke is computed, its last one too."""

    def first_token(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        """A WHOLE stroke has chosen its first token."""

    def decode_started(self, sequence: Sequence, start_s: float, first_s: float) -> None:
        """The first step of a DECODE stroke ran from start_s to first_s."""

    def finished(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        """The answer is complete."""

    def preempted(self, sequence: Sequence) -> None:
        """The sequence lost its blocks and waits for its tokens to be computed again."""

    def reserved(self, engine: Batching, sequence: Sequence, now_s: float) -> None:
        """A DECODE stroke has its blocks: KV may come."""
