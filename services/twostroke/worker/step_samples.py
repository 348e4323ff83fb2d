"""The steps of late, for the routers' models of this worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from twostroke.engine.base import StepSample

KEPT = 8
"""Of each kind: steps with a prompt are fewer, and must not be pushed out by the others."""


class StepSamples:
    """Samples with their numbers, counted from 1."""

    def __init__(self) -> None:
        self._count = 0
        self._with_prompt: deque[tuple[int, StepSample]] = deque(maxlen=KEPT)
        self._without: deque[tuple[int, StepSample]] = deque(maxlen=KEPT)

    def took(self, samples: Sequence[StepSample]) -> None:
        """The engine made steps."""
        for sample in samples:
            self._count += 1
            kept = self._with_prompt if sample.batch.prefill_tokens else self._without
            kept.append((self._count, sample))

    def since(self, number: int) -> tuple[int, list[StepSample]]:
        """The number of the latest sample, and what is kept of those after a number, the oldest first."""
        found = {each: sample for each, sample in (*self._with_prompt, *self._without) if each > number}
        return self._count, [found[each] for each in sorted(found)]
