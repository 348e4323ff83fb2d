"""How much of a prompt a step of this engine may hold to take no longer than it is to."""

from __future__ import annotations

from twostroke.policy.perf_model import WITH_PROMPT, WorkerModel
from twostroke.policy.snapshot import DEFAULT_STEP_MODEL
from twostroke.policy.step_model import StepBatch
from twostroke.policy.turns import room_within


class Pace:
    """Learns what steps take."""

    def __init__(self) -> None:
        self._learned = WorkerModel(DEFAULT_STEP_MODEL)
        self._share = 1.0
        """Time that the last step with a prompt took, as a share of what it would have without spare cores."""

    def observe(self, batch: StepBatch, own_s: float, took_s: float) -> None:
        """A step that took took_s, and without spare cores would have taken own_s."""
        self._learned.observe(batch, own_s)
        if batch.prefill_tokens and own_s > 0:
            self._share = took_s / own_s

    def room(self, most_s: float, room_tokens: int, answers: int, context_tokens: int, depth_tokens: int) -> int:
        """See room_within; all of the room until steps with prompts are known."""
        if not self._learned.knows(WITH_PROMPT):
            return room_tokens
        own_s = most_s / max(self._share, 0.01)
        return room_within(own_s, room_tokens, self._learned.model, answers, context_tokens, depth_tokens)
