"""How much of a prompt a step of this engine may hold to take no longer than it is to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from twostroke.policy.perf_model import WITH_PROMPT, WorkerModel
from twostroke.policy.snapshot import DEFAULT_STEP_MODEL
from twostroke.policy.step_model import LinearStepModel, StepBatch
from twostroke.policy.turns import SHORT_S, is_short, room_within


class Pace:
    """Learns what steps take."""

    def __init__(self) -> None:
        assert isinstance(DEFAULT_STEP_MODEL, LinearStepModel)
        self._learned = WorkerModel(DEFAULT_STEP_MODEL)
        self._short_s = -math.inf
        """When a short prompt came last."""
        self._share = 1.0
        """Time that the last step with a prompt took, as a share of what it would have without spare cores."""

    def bounds(self, now_s: float, come: Sequence[int], room_tokens: int) -> bool:
        """Whether steps are to be bounded now; come: tokens of the prompts that wait to be begun."""
        if come and is_short(min(come), room_tokens):
            self._short_s = now_s
        return now_s < self._short_s + SHORT_S

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
