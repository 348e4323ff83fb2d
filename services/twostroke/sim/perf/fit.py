"""The fit of efficiencies: maximum a posteriori, by Gauss-Newton steps, on a small choice of runs.

Errors are taken relative, and with heavy tails, so that a run that nothing explains does not bend the rest. They are
sharpened in rounds: what looks like an outlier at first is often only not fitted yet.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from twostroke.sim.perf.levels import LEVELS, PRIOR, SPREADS, Setting, groups
from twostroke.sim.perf.measured import Fittable

Floats = NDArray[np.float64]

_ERRORS = np.array([0.10, 0.03])  # of TTFT and TPOT, relative
_ROUNDS = ((4.0, 6), (2.0, 6), (1.0, 14))  # (errors taken so many times larger, steps at most)
_FREEDOM = 4.0
_SHIFT = 0.01
_ENOUGH = 2e-4
_LEAST_PART = 0.01
_SIZE = len(PRIOR)


@dataclass(frozen=True, slots=True)
class Fitted:
    """What each group adds to the prior, on the fit's scale."""

    added: Mapping[str, Floats]

    def scaled(self, setting: Setting) -> Floats:
        """The setting's efficiencies on the fit's scale. Groups that were not fitted add nothing."""
        total: Floats = PRIOR + sum((self.added[key] for key in groups(setting) if key in self.added), np.zeros(_SIZE))
        return total

    def errors(self, runs: Sequence[Fittable]) -> Floats:
        """Logarithms of predicted over measured: a row per run, TTFT and TPOT."""
        return np.array([each.predict(self.scaled(each.setting)) - each.observed for each in runs])


class _Problem:
    """The posterior's pieces: runs as blocks of parameters, one block per group."""

    def __init__(self, runs: Sequence[Fittable]) -> None:
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
        return np.asarray(PRIOR + x.reshape(-1, _SIZE)[self.blocks[run]].sum(axis=0))

    def misses(self, x: Floats) -> Floats:
        return np.array([each.observed - each.predict(self.scaled(x, i)) for i, each in enumerate(self.runs)])

    def cost(self, x: Floats, misses: Floats, errors: Floats) -> float:
        tails = (_FREEDOM + 1) / 2 * np.log1p((misses / errors) ** 2 / _FREEDOM)
        return float(tails.sum() + ((x / self.prior_spread) ** 2).sum() / 2)

    def target(self, x: Floats, errors: Floats) -> Floats:
        """Where the quadratic at x has its least cost.

        There are far fewer observations than parameters, so it is solved for the observations.
        """
        slopes = np.zeros((2 * len(self.runs), len(x)))
        misses, spread = np.zeros(len(slopes)), np.zeros(len(slopes))
        for i, each in enumerate(self.runs):
            at = self.scaled(x, i)
            variants = each.predict(np.vstack([at, at + _SHIFT * np.eye(_SIZE)]))
            rows = slice(2 * i, 2 * i + 2)
            slopes[rows, self.columns[i]] = np.tile((variants[1:] - variants[0]).T / _SHIFT, len(LEVELS))
            misses[rows] = each.observed - variants[0]
            spread[rows] = errors**2 * (_FREEDOM + (misses[rows] / errors) ** 2) / (_FREEDOM + 1)
        weighted = slopes * self.prior_spread**2
        inner = weighted @ slopes.T + np.diag(spread)
        return np.asarray(weighted.T @ np.linalg.solve(inner, misses + slopes @ x))


def fit(runs: Sequence[Fittable], start: Fitted | None = None) -> Fitted:
    """Fits the groups of these runs. start: what to start from, as when one run fewer is fitted on; saves rounds."""
    problem = _Problem(runs)
    x = np.zeros(len(problem.prior_spread))
    if start is not None:
        x = np.concatenate([start.added.get(key, np.zeros(_SIZE)) for key in problem.index])
    for factor, steps in _ROUNDS if start is None else _ROUNDS[-1:]:
        x = _descend(problem, x, _ERRORS * factor, steps)
    blocks = x.reshape(-1, _SIZE)
    return Fitted({key: blocks[i] for key, i in problem.index.items()})


def _descend(problem: _Problem, x: Floats, errors: Floats, steps: int) -> Floats:
    cost = problem.cost(x, problem.misses(x), errors)
    for _ in range(steps):
        way = np.clip(problem.target(x, errors) - x, -1, 1)
        part, found = 1.0, np.inf
        while part > _LEAST_PART:
            tried = x + part * way
            found = problem.cost(tried, problem.misses(tried), errors)
            if found < cost:
                break
            part /= 3
        if found >= cost:
            break
        x, gain, cost = tried, cost - found, found
        if gain < _ENOUGH * cost:
            break
    return x
