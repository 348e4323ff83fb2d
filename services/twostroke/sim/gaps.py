"""The gaps between tokens of all answers, as a weighted histogram."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_BITS = 10
"""Bits of the mantissa that a bin keeps: bins are at most 0.1 % wide."""
_SHIFT = 52 - _BITS
_ROW = 4
_KEEP = _ROW << 15


class Gaps:
    """Counts gaps by their size, to 0.1 %. limit_s: of a good gap, 0 for none."""

    __slots__ = ("_counts", "_pending", "largest_s", "limit_s")

    def __init__(self, limit_s: float = 0.0) -> None:
        self.limit_s = limit_s
        self.largest_s = 0.0
        self._pending: list[float] = []
        self._counts: dict[int, int] = {}

    def add(self, first_s: float, delta_s: float, steps: int, weight: int) -> None:
        """The gaps first_s, first_s + delta_s, ... of consecutive steps, each of them `weight` times."""
        pending = self._pending
        pending.extend((first_s, delta_s, steps, weight))
        if len(pending) >= _KEEP:
            self._flush()

    def bins(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        """(sizes in seconds, counts), in order of size. A size is the middle of its bin."""
        self._flush()
        keys = np.array(sorted(self._counts), dtype=np.int64)
        counts = np.array([self._counts[key] for key in keys.tolist()], dtype=np.int64)
        return ((keys << _SHIFT) + (1 << (_SHIFT - 1))).view(np.float64), counts

    def merge(self, others: Sequence[Gaps]) -> None:
        """Adds the counts of others."""
        for other in others:
            other._flush()
            self.largest_s = max(self.largest_s, other.largest_s)
            for key, count in other._counts.items():
                self._counts[key] = self._counts.get(key, 0) + count

    def _flush(self) -> None:
        if not self._pending:
            return
        table = np.array(self._pending, dtype=np.float64).reshape(-1, _ROW)
        self._pending.clear()
        steps = table[:, 2].astype(np.int64)
        rows = np.repeat(np.arange(len(steps)), steps)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(steps) - steps, steps)
        sizes = table[rows, 0] + place * table[rows, 1]
        self.largest_s = max(self.largest_s, float(sizes.max()))
        keys = sizes.view(np.int64) >> _SHIFT
        # Gaps between a quantum and the horizon of virtual time lie in some ten thousand bins, so nothing is sorted.
        first = int(keys.min())
        found = np.bincount(keys - first, weights=table[rows, 3])
        seen = np.flatnonzero(found)
        counts = self._counts
        for key, count in zip((seen + first).tolist(), found[seen].astype(np.int64).tolist(), strict=True):
            counts[key] = counts.get(key, 0) + count
