"""Which runs to fit on: at most a tenth of each model and system, chosen before any measured value is looked at.

The choice is greedy: of all runs that may still be taken, the next is the one that, by the prior and the slopes of the
predictions, tells most about all runs together. So it depends on set-ups alone, and is the same every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from twostroke.sim.perf.levels import LEVELS, PRIOR, SPREADS, groups
from twostroke.sim.perf.measured import Fittable

Floats = NDArray[np.float64]

SHARE = 0.1
_SHIFT = 0.01
_ERROR = 0.05  # expected of one observation
_SPREAD = 0.48  # of the levels' standard deviations; the whole would go for the extremes only


def choose(runs: Sequence[Fittable], share: float = SHARE) -> list[int]:
    """Indices of the runs to fit on: of every (model, system) the share, rounded down but at least one.

    Runs that press against their KV memory are not taken while there are others.
    """
    covariance = _covariance(runs)
    free = {each.run.group for each in runs if not each.pressed}
    usable = np.array([not each.pressed or each.run.group not in free for each in runs])
    left = {group: max(1, int(share * size)) for group, size in Counter(each.run.group for each in runs).items()}
    numbers = {group: index for index, group in enumerate(left)}
    owner = np.array([numbers[each.run.group] for each in runs])
    quota = np.array(list(left.values()))
    chosen: list[int] = []
    while (candidates := np.flatnonzero(usable & (quota[owner] > 0))).size:
        gain = np.square(covariance[candidates]).sum(axis=1) / (covariance[candidates, candidates] + _ERROR**2)
        best = int(candidates[int(np.argmax(gain))])
        chosen.append(best)
        usable[best] = False
        quota[owner[best]] -= 1
        column = covariance[:, best].copy()
        covariance -= np.outer(column, column) / (column[best] + _ERROR**2)
    return sorted(chosen)


def _covariance(runs: Sequence[Fittable]) -> Floats:
    """What the prior says about the common errors of the predicted times between tokens."""
    variants = np.vstack([PRIOR, PRIOR + _SHIFT * np.eye(len(PRIOR))])
    found = np.array([each.predict(variants)[:, 1] for each in runs])
    slopes = (found[:, 1:] - found[:, :1]) / _SHIFT * SPREADS
    keys = [groups(each.setting) for each in runs]
    shared = np.zeros((len(runs), len(runs)))
    for level, (_, spread) in enumerate(LEVELS):
        own = np.unique([key[level] for key in keys], return_inverse=True)[1]
        shared += (_SPREAD * spread) ** 2 * (own[:, None] == own[None, :])
    return np.asarray((slopes @ slopes.T) * shared)
