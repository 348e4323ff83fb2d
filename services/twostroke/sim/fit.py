"""From measured steps to a step model: non-negative least squares by relative error, over the medians of equal steps:
a machine that is slow for a minute is slow for a few of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.errors import ConfigError
from twostroke.policy.step_model import LinearStepModel

_FEATURES = 6


@dataclass(frozen=True, slots=True)
class Sample:
    """Some consecutive steps and what they took together, in sums over the steps; see LinearStepModel."""

    seconds: float
    steps: int
    sequences: float = 0.0
    context_tokens: float = 0.0
    prefill_tokens: float = 0.0
    prefill_pairs: float = 0.0
    prefill_chunks: float = 0.0

    def row(self) -> list[float]:
        """The features, in the order of LinearStepModel's fields."""
        return [
            float(self.steps),
            self.sequences,
            self.context_tokens,
            self.prefill_tokens,
            self.prefill_pairs,
            self.prefill_chunks,
        ]


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how far it is from the samples. median_error: as a share of each sample's time."""

    model: LinearStepModel
    median_error: float
    residual_s: float


def fit(samples: Sequence[Sample]) -> Fit:
    """Raises ConfigError when there are too few samples to tell the terms apart."""
    if len(samples) < _FEATURES:
        raise ConfigError(f"{len(samples)} measured steps are too few for a profile; {_FEATURES} are needed")
    times_s: dict[tuple[float, ...], list[float]] = {}
    for each in samples:
        times_s.setdefault(tuple(each.row()), []).append(each.seconds)
    middle_s = np.array([np.median(found) for found in times_s.values()])
    terms = _non_negative(np.array(list(times_s)) / middle_s[:, None])
    model = LinearStepModel(
        const_s=float(terms[0]),
        per_sequence_s=float(terms[1]),
        per_context_token_s=float(terms[2]),
        per_prefill_token_s=float(terms[3]),
        per_prefill_pair_s=float(terms[4]),
        per_prefill_chunk_s=float(terms[5]),
    )
    rows = np.array([each.row() for each in samples])
    seconds = np.array([each.seconds for each in samples])
    errors = rows @ terms - seconds
    return Fit(model, float(np.median(np.abs(errors) / seconds)), float(np.std(errors)))


def _non_negative(rows: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Least squares of rows @ x = 1 with x >= 0: Lawson and Hanson's active sets."""
    size = rows.shape[1]
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    matrix, target = rows / scale, np.ones(len(rows))
    x = np.zeros(size)
    active = np.zeros(size, dtype=bool)
    for _ in range(10 * size):
        gradient = matrix.T @ (target - matrix @ x)
        free = ~active & (gradient > 1e-9)
        if not free.any():
            break
        active[int(np.argmax(np.where(free, gradient, -np.inf)))] = True
        while True:
            trial = np.zeros(size)
            trial[active] = np.linalg.lstsq(matrix[:, active], target, rcond=None)[0]
            if (trial[active] > 0).all():
                x = trial
                break
            low = active & (trial <= 0)
            x = x + np.min(x[low] / (x[low] - trial[low])) * (trial - x)
            active &= x > 1e-12
            x[~active] = 0
    found: npt.NDArray[np.float64] = x / scale
    return found
