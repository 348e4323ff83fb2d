"""What placement, simulator and planner ask of a step model; see step_model.py.

Apart from the models there, since those are compiled: what is not compiled can inherit from no compiled protocol.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from twostroke.policy.step_model import StepBatch


class StepModel(Protocol):
    """Step times of one replica (all its devices together)."""

    def decode_terms(self, sequences: int) -> tuple[float, float]:
        """(base_s, per_context_token_s): a pure decode step takes base_s + per_context_token_s * context_tokens.

        sequences: at least one; all of the step's.
        """
        ...

    def step_s(self, batch: StepBatch) -> float:
        """Seconds of a step; of a batch without prefill tokens exactly what decode_terms gives, 0 of an empty one."""
        return self.batch_s(*batch)

    def batch_s(self, sequences: int, context_tokens: int, new_tokens: int, pairs: float, chunks: int = 1, /) -> float:
        """step_s of the batch of these, in its order, for those who ask so often that making the tuple counts."""
        ...
