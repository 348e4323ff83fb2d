"""Step times of one worker, learned while it serves.

The first steps, of those without and those with a prompt, only scale the prior, by their median: it may be wrong by a
hundred times, and so may one of them. After that, recursive least squares on the terms of a LinearStepModel, each as a
multiple of its first value. Terms never become negative, old steps are forgotten, a step that took absurdly long or
short is set aside, and steps that stay absurd are a new beginning.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

from twostroke.policy.step_model import LinearStepModel, StepBatch
from twostroke.policy.turns import SPARE_TOKENS

WITHOUT_PROMPT, WITH_PROMPT = range(2)
KIND_TERMS = (range(3), range(3, 6))
"""Which terms the first steps of a kind scale."""
TERMS = (
    "const_s",
    "per_sequence_s",
    "per_context_token_s",
    "per_prefill_token_s",
    "per_prefill_pair_s",
    "per_prefill_chunk_s",
)
SMALLEST = (1e-5, 1e-7, 1e-11, 1e-8, 1e-13, 1e-7)
"""Scale of a term whose prior is 0, so that it can be learned all the same."""

LEAST = 1e-3
"""Of a term that is to be scaled: 0 could not be."""
SHORTEST_S = 1e-9

FORGETTING = 0.998
"""Weight of a step relative to the next one's: the last 500 or so count."""
NOISE = 0.05
MOST_NOISE = 0.1
"""Relative spread of step times that is believed to be noise: at least and at most, else as it is found."""
DOUBT = 3.0
"""Relative uncertainty of the terms once they are scaled."""
WARM_UP = 7
"""Steps of a kind that only scale."""
FIRST_DEVIATION = 0.3
"""Usual deviation after that, until it is known better."""
GATE = 4.0
"""A step is set aside when the logarithm of measured over predicted exceeds this many usual deviations,"""
LEAST_GATE = 0.4
"""but at least this."""
SPARED = 0.1
"""Share of a step from which spare cores count as used."""
SPARE_WEIGHT = 0.2
"""Of the latest step that used them, in what they leave of a step's time."""
PERSISTENT = 6
"""So many set aside in a row, all on the same side, are a change of the worker and no accident."""


@dataclass(slots=True)
class _Kind:
    """Steps without a prompt, or those with one."""

    base: list[float]
    """Terms before scaling."""
    first: list[tuple[StepBatch, float]] = field(default_factory=list)
    deviation: float = FIRST_DEVIATION
    """Usual size of the logarithm of measured over predicted."""
    run: int = 0
    """Steps set aside in a row; negative when they were too short."""


class WorkerModel:
    """Learns one worker's step times. prior: from the model's shape and the hardware, or from a profile."""

    def __init__(self, prior: LinearStepModel) -> None:
        self.steps = 0
        """Steps learned from."""
        self.set_aside = 0
        """Steps that were not believed."""
        self.spare_share = 1.0
        """What steps that use spare cores take of what they would without; 1 until there was one."""
        values: list[float] = [getattr(prior, name) for name in TERMS]
        self._scales = [value or smallest for value, smallest in zip(values, SMALLEST, strict=True)]
        self._theta = [max(LEAST, value / scale) for value, scale in zip(values, self._scales, strict=True)]
        self._kinds = [_Kind(self._theta), _Kind(self._theta)]
        self._spread: list[list[float]] = []
        self._error: float | None = None
        self._model: LinearStepModel | None = prior
        self._doubt_all()

    @property
    def model(self) -> LinearStepModel:
        """What is known now; the prior until the first step."""
        if self._model is None:
            self._model = LinearStepModel(*map(float.__mul__, self._scales, self._theta))
        return self._model

    @property
    def prefill_token_s(self) -> float:
        """About what a prompt token takes, in chunks of 512."""
        return self.model.step_s(StepBatch(0, 0, 512, 512 * 512 / 2, 1)) / 512

    @property
    def error(self) -> float | None:
        """Mean relative error of the predictions for the latest steps, each made before its step was learned from;
        None before the first. Steps set aside are not in it."""
        return self._error

    def knows(self, kind: int) -> bool:
        """Whether steps of a kind, WITHOUT_PROMPT or WITH_PROMPT, were seen often enough to say something of them."""
        return len(self._kinds[kind].first) > WARM_UP // 2

    def observe(self, batch: StepBatch, step_s: float, spared_s: float = 0.0) -> bool:
        """Learns from a step. Returns whether it was believed. Empty batches and times of 0 teach nothing.

        step_s: what it would have taken on the worker's own cores; spared_s: what spare ones saved of it.
        """
        if batch.sequences + batch.prefill_tokens == 0 or step_s <= 0:
            return False
        if batch.prefill_tokens >= SPARE_TOKENS and spared_s > SPARED * step_s:
            share = 1 - spared_s / step_s
            self.spare_share += (share - self.spare_share) * (SPARE_WEIGHT if self.spare_share < 1 else 1.0)
        predicted_s = max(self.model.step_s(batch), SHORTEST_S)
        kind = self._kinds[WITH_PROMPT if batch.prefill_tokens else WITHOUT_PROMPT]
        off = math.log(step_s / predicted_s)
        if len(kind.first) == WARM_UP and abs(off) > max(GATE * kind.deviation, LEAST_GATE):
            kind.run = kind.run + 1 if off > 0 and kind.run >= 0 else kind.run - 1 if off < 0 and kind.run <= 0 else 0
            if abs(kind.run) < PERSISTENT:
                self.set_aside += 1
                return False
            self._begin_again()
            kind = self._kinds[WITH_PROMPT if batch.prefill_tokens else WITHOUT_PROMPT]
        kind.run = 0
        self.steps += 1
        relative = abs(step_s - predicted_s) / max(step_s, predicted_s)
        self._error = relative if self._error is None else 0.95 * self._error + 0.05 * relative
        self._model = None
        if len(kind.first) < WARM_UP:
            self._scale(kind, batch, step_s)
        else:
            kind.deviation = 0.95 * kind.deviation + 0.05 * min(abs(off) * 1.25, 1.0)
            self._learn(batch, step_s, predicted_s, max(NOISE, min(kind.deviation, MOST_NOISE)))
        return True

    def _begin_again(self) -> None:
        self._theta = [max(LEAST, value) for value in self._theta]
        self._kinds = [_Kind(self._theta), _Kind(self._theta)]
        self._error = None
        self._doubt_all()

    def _scale(self, kind: _Kind, batch: StepBatch, step_s: float) -> None:
        """Scales the terms of a kind to the median of its first steps; with the last of them, learns from all."""
        kind.first.append((batch, step_s))
        terms = KIND_TERMS[self._kinds.index(kind)]
        ratios = []
        for each, each_s in kind.first:
            parts = [count * scale for count, scale in zip(_held(each), self._scales, strict=True)]
            own_s = sum(parts[term] * kind.base[term] for term in terms)
            other_s = sum(parts[term] * self._theta[term] for term in range(len(TERMS)) if term not in terms)
            ratios.append((each_s - other_s) / own_s if each_s > other_s else each_s / (own_s + other_s))
        ratio = statistics.median_low(ratios)
        for term in terms:
            self._theta[term] = kind.base[term] * ratio
        if len(kind.first) == WARM_UP:
            for each, each_s in kind.first:
                predicted_s = max(self.model.step_s(each), SHORTEST_S)
                if abs(math.log(each_s / predicted_s)) < GATE * FIRST_DEVIATION:
                    self._learn(each, each_s, predicted_s, MOST_NOISE)
                    self._model = None

    def _doubt_all(self) -> None:
        size = len(TERMS)
        self._spread = [[0.0] * size for _ in range(size)]
        for term in range(size):
            self._spread[term][term] = self._most(term)

    def _most(self, term: int) -> float:
        doubt = DOUBT * max(1.0, self._theta[term])
        return doubt * doubt

    def _learn(self, batch: StepBatch, step_s: float, unit_s: float, noise: float) -> None:
        """One step of the filter, in units of unit_s so that short steps count like long ones."""
        row = [count * scale / unit_s for count, scale in zip(_held(batch), self._scales, strict=True)]
        spread = self._spread
        towards = [sum(map(float.__mul__, line, row)) for line in spread]
        certainty = noise**2 + sum(map(float.__mul__, towards, row))
        surprise = step_s / unit_s - sum(map(float.__mul__, self._theta, row))
        self._theta = [value + gain * surprise / certainty for value, gain in zip(self._theta, towards, strict=True)]
        grown = []
        for term, gain in enumerate(towards):
            spread[term] = [
                value - gain * other / certainty for value, other in zip(spread[term], towards, strict=True)
            ]
            # What no step tells about must not become ever less certain.
            room = self._most(term) / max(spread[term][term], 1e-12)
            grown.append(math.sqrt(max(1.0, min(1 / FORGETTING, room))))
        for term, line in enumerate(spread):
            spread[term] = [value * grown[term] * other for value, other in zip(line, grown, strict=True)]
        self._stay_positive()

    def _stay_positive(self) -> None:
        """Moves to the nearest terms without a negative one, near as the spread measures it."""
        for term in range(len(self._theta)):
            if self._theta[term] < 0:
                share = self._theta[term] / max(self._spread[term][term], 1e-12)
                self._theta = [
                    value - share * line[term] for value, line in zip(self._theta, self._spread, strict=True)
                ]
                self._theta[term] = 0.0
        self._theta = [max(0.0, value) for value in self._theta]


def _held(batch: StepBatch) -> tuple[float, ...]:
    """What a batch has of every term."""
    return (
        1.0,
        batch.sequences,
        batch.context_tokens,
        batch.prefill_tokens,
        batch.prefill_pairs,
        batch.prefill_chunks,
    )
