"""How long an engine step takes, as placement, simulator and planner see it.

Every model here answers two questions about one replica: what a step of a given batch takes, and what pure decode
steps of a given number of sequences take as an affine function of their contexts. The second lets a simulator jump over
many equal steps: k steps of b sequences whose contexts sum to C at the first take
k * (base + slope * C) + slope * b * k * (k - 1) / 2 seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from twostroke.policy.step_protocol import StepModel

__all__ = ["LinearStepModel", "StepBatch", "StepModel", "chunk_pairs", "decode_run_s"]


class StepBatch(NamedTuple):
    """What one engine step computes. A tuple, since a decision and a simulated step make several.

    sequences: sequences that decode one token each.
    context_tokens: sum of their contexts.
    prefill_tokens: new prompt tokens, all chunks together.
    prefill_pairs: attention pairs, the sum over chunks of m * (2 * p + m) / 2, where p tokens were computed before
        and m are new.
    prefill_chunks: prompts that the prefill tokens belong to.
    """

    sequences: int
    context_tokens: int
    prefill_tokens: int
    prefill_pairs: float
    prefill_chunks: int = 0


def chunk_pairs(computed_tokens: int, new_tokens: int) -> float:
    """Attention pairs of one chunk of new_tokens after computed_tokens of the same prompt."""
    return new_tokens * (2 * computed_tokens + new_tokens) / 2


def decode_run_s(model: StepModel, sequences: int, context_tokens: int, steps: int) -> float:
    """Seconds of consecutive pure decode steps.

    context_tokens: sum of the contexts at the first step; every sequence grows by one token a step.
    """
    base_s, slope_s = model.decode_terms(sequences)
    return steps * (base_s + slope_s * context_tokens) + slope_s * sequences * steps * (steps - 1) / 2


@dataclass(frozen=True)
class LinearStepModel:
    """A step time that is linear in what the batch holds: the form fitted on line and taken from a worker's profile.

    const_s: of every step; per_prefill_chunk_s: of each prompt that has tokens in the step.
    """

    const_s: float
    per_sequence_s: float
    per_context_token_s: float
    per_prefill_token_s: float
    per_prefill_pair_s: float = 0.0
    per_prefill_chunk_s: float = 0.0

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """See StepModel."""
        return self.const_s + self.per_sequence_s * sequences, self.per_context_token_s

    def step_s(self, batch: StepBatch) -> float:
        """See StepModel."""
        return self.batch_s(*batch)

    def batch_s(self, sequences: int, context_tokens: int, new_tokens: int, pairs: float, chunks: int = 1, /) -> float:
        """See StepModel."""
        if sequences + new_tokens == 0:
            return 0.0
        return (
            self.const_s
            + self.per_sequence_s * sequences
            + self.per_context_token_s * context_tokens
            + self.per_prefill_token_s * new_tokens
            + self.per_prefill_pair_s * pairs
            + self.per_prefill_chunk_s * chunks
        )
