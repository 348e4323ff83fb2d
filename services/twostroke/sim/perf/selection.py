"""Which runs to fit on: at most a tenth of each model and system, chosen before any measured value is looked at.

The choice is greedy: of all runs that may still be taken, the next is the one that, by the prior and the slopes of the
predictions, tells most about all runs together. So it depends on set-ups alone, and is the same every time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from twostroke.sim.perf.levels import LEVELS, PRIOR, SPREADS, groups
from twostroke.sim.perf.measured import Prepared

SHARE = 0.1
_SHIFT = 0.01
_ERRORS = (0.15, 0.05)  # expected of one observation of TTFT and TPOT
_WORTH = (0.3, 1.0)  # of knowing TTFT against knowing TPOT
_SPREAD = 0.6  # of the levels' standard deviations; the whole would go for the extremes only


def choose(runs: Sequence[Prepared], share: float = SHARE) -> list[int]:
    """Indices of the runs to fit on: of every (model, system) the share, rounded down but at least one."""
    covariance = _covariance(runs)
    count = len(runs)
    errors = np.repeat(np.square(_ERRORS), count)
    worth = np.repeat(np.square(_WORTH), count)
    sizes = Counter(each.run.group for each in runs)
    left = {group: max(1, int(share * size)) for group, size in sizes.items()}
    chosen: list[int] = []
    for _ in range(sum(left.values())):
        open_runs = np.array([i for i in range(count) if left[runs[i].run.group] and i not in set(chosen)])
        gain = np.zeros(len(open_runs))
        for first in (0, count):
            rows = covariance[open_runs + first]
            variance = rows[np.arange(len(open_runs)), open_runs + first] + errors[open_runs + first]
            gain += np.square(rows) @ worth / variance
        best = int(open_runs[int(np.argmax(gain))])
        chosen.append(best)
        left[runs[best].run.group] -= 1
        for seen in (best, best + count):
            column = covariance[:, seen].copy()
            covariance -= np.outer(column, column) / (column[seen] + errors[seen])
    return sorted(chosen)


def _covariance(runs: Sequence[Prepared]) -> np.ndarray:
    """What the prior says about the predictions' common errors: first all TTFT, then all TPOT."""
    variants = np.vstack([PRIOR, PRIOR + _SHIFT * np.eye(len(PRIOR))])
    slopes = np.array([(lambda found: (found[1:] - found[0]).T / _SHIFT)(each.predict(variants)) for each in runs])
    slopes *= SPREADS
    keys = [groups(each.setting) for each in runs]
    shared = np.zeros((len(runs), len(runs)), dtype=np.float32)
    for level, (_, spread) in enumerate(LEVELS):
        own = np.unique([key[level] for key in keys], return_inverse=True)[1]
        shared += (_SPREAD * spread) ** 2 * (own[:, None] == own[None, :])
    flat = np.concatenate([slopes[:, 0], slopes[:, 1]]).astype(np.float32)
    return (flat @ flat.T) * np.tile(shared, (2, 2))
