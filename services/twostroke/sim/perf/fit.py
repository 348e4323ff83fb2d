"""The fit of efficiencies: maximum a posteriori, by damped Gauss-Newton steps, on a small choice of runs.

Errors are taken relative, and with heavy tails, so that a run that nothing explains does not bend the rest. They are
sharpened in rounds: what looks like an outlier at first is often only not fitted yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twostroke.sim.perf.levels import LEVELS, PRIOR, SPREADS, Setting, groups
from twostroke.sim.perf.measured import Prepared

Floats = NDArray[np.float64]

_ERRORS = np.array([0.10, 0.03])  # of TTFT and TPOT, relative
_ROUNDS = ((4.0, 6), (2.0, 6), (1.0, 14))  # (errors taken so many times larger, steps at most)
_FREEDOM = 4.0
_SHIFT = 0.01
_ENOUGH = 1e-3
_SIZE = len(PRIOR)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What each group adds to the prior, on the fit's scale."""

    added: Mapping[str, Floats]

    def scaled(self, setting: Setting) -> Floats:
        """The setting's efficiencies on the fit's scale. Groups that were not fitted add nothing."""
        return PRIOR + sum((self.added[key] for key in groups(setting) if key in self.added), np.zeros(_SIZE))

    def errors(self, runs: Sequence[Prepared]) -> Floats:
        """Logarithms of predicted over measured: a row per run, TTFT and TPOT."""
        return np.array([each.predict(self.scaled(each.setting)) - each.observed for each in runs])


class _Problem:
    """The posterior's pieces: runs as blocks of parameters, one block per group."""

    def __init__(self, runs: Sequence[Prepared]) -> None:
        self.runs = runs
        self.index: dict[str, int] = {}
        spreads: list[float] = []
        self.blocks: list[NDArray[np.int64]] = []
        for each in runs:
            own = []
            for key, (_, spread) in zip(groups(each.setting), LEVELS, strict=True):
                if key not in self.index:
                    self.index[key] = len(spreads)
                    spreads.append(spread)
                own.append(self.index[key])
            self.blocks.append(np.array(own))
        self.prior_spread = np.concatenate([spread * SPREADS for spread in spreads])
        self.columns = [(block[:, None] * _SIZE + np.arange(_SIZE)).ravel() for block in self.blocks]

    def scaled(self, x: Floats, run: int) -> Floats:
        return PRIOR + x.reshape(-1, _SIZE)[self.blocks[run]].sum(axis=0)

    def misses(self, x: Floats) -> Floats:
        return np.array([each.observed - each.predict(self.scaled(x, i)) for i, each in enumerate(self.runs)])

    def cost(self, x: Floats, misses: Floats, errors: Floats) -> float:
        tails = (_FREEDOM + 1) / 2 * np.log1p((misses / errors) ** 2 / _FREEDOM)
        return float(tails.sum() + ((x / self.prior_spread) ** 2).sum() / 2)

    def normal(self, x: Floats, errors: Floats) -> tuple[Floats, Floats]:
        """Matrix and right side of the next step."""
        matrix = np.diag(1 / self.prior_spread**2)
        side = -x / self.prior_spread**2
        for i, each in enumerate(self.runs):
            at = self.scaled(x, i)
            variants = each.predict(np.vstack([at, at + _SHIFT * np.eye(_SIZE)]))
            slopes = (variants[1:] - variants[0]).T / _SHIFT
            miss = each.observed - variants[0]
            weight = (_FREEDOM + 1) / (_FREEDOM + (miss / errors) ** 2) / errors**2
            columns, repeated = self.columns[i], np.tile(slopes, len(LEVELS))
            matrix[np.ix_(columns, columns)] += repeated.T @ (weight[:, None] * repeated)
            side[columns] += repeated.T @ (weight * miss)
        return matrix, side


def fit(runs: Sequence[Prepared]) -> Fitted:
    """Fits the groups of these runs."""
    problem = _Problem(runs)
    x = np.zeros(len(problem.prior_spread))
    for factor, steps in _ROUNDS:
        x = _descend(problem, x, _ERRORS * factor, steps)
    blocks = x.reshape(-1, _SIZE)
    return Fitted({key: blocks[i] for key, i in problem.index.items()})


def _descend(problem: _Problem, x: Floats, errors: Floats, steps: int) -> Floats:
    damping = 0.1
    cost = problem.cost(x, problem.misses(x), errors)
    for _ in range(steps):
        matrix, side = problem.normal(x, errors)
        while damping < 1e6:
            step = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix)), side)
            tried = x + np.clip(step, -1, 1)
            found = problem.cost(tried, problem.misses(tried), errors)
            if found < cost:
                break
            damping *= 4
        else:
            return x
        x, damping, gain, cost = tried, max(damping / 4, 1e-6), cost - found, found
        if gain < _ENOUGH * cost:
            break
    return x
