"""How many requests will arrive: from what arrived, its trend, and what comes back again and again."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_PERIODS = 0.7
"""Periods that must have been seen before one is believed in."""
_SHORTEST_S = 300.0
_STEPS = 64
_SIGNIFICANT = 8.0


@dataclass(frozen=True, slots=True)
class Rate:
    """Requests per second, and how uncertain that is (one standard deviation)."""

    per_s: float
    sigma: float

    def high(self, deviations: float) -> float:
        """So many standard deviations more."""
        return self.per_s + deviations * self.sigma


@dataclass(frozen=True, slots=True)
class _Wave:
    """rate(t) = mean + cosine * cos(w t) + sine * sin(w t). sigma: of its value."""

    omega: float
    mean: float
    cosine: float
    sine: float
    sigma: float

    def at(self, at_s: float) -> float:
        return self.mean + self.cosine * math.cos(self.omega * at_s) + self.sine * math.sin(self.omega * at_s)


class Forecast:
    """Of one stream of arrivals, counted in intervals of about the same length.

    level_s: of history that a constant rate is estimated from. trend_s: that a trend is. Nothing that arrived counts as
    a rate of zero, not as unknown.
    """

    def __init__(self, level_s: float = 300.0, trend_s: float = 100.0, kept_s: float = 7200.0) -> None:
        self._level_s = level_s
        self._trend_s = trend_s
        self._seen: deque[tuple[float, float, float]] = deque()
        self._kept_s = kept_s
        self._wave: _Wave | None = None
        self._tried = 0

    def add(self, now_s: float, arrivals: int, over_s: float) -> None:
        """So many requests arrived in the over_s seconds before now."""
        self._seen.append((now_s - over_s / 2, over_s, float(arrivals)))
        while self._seen[0][0] < now_s - self._kept_s:
            self._seen.popleft()
        self._tried -= 1
        if self._tried <= 0:
            # A new fit now and then: it looks at the whole history.
            self._tried = 6
            self._wave = self._fit_wave()

    @property
    def periodic(self) -> bool:
        """Whether a period was found."""
        return self._wave is not None

    def at(self, at_s: float) -> Rate:
        """The rate at a time, now or later."""
        if not self._seen:
            return Rate(0.0, 0.0)
        if self._wave is not None:
            return Rate(max(0.0, self._wave.at(at_s)), self._wave.sigma)
        recent = self._recent(self._trend_s)
        slope, deviation = _slope(recent)
        if abs(slope) > 3 * deviation > 0:
            centre_s = sum(each[0] for each in recent) / len(recent)
            mean = _mean(recent)
            ahead_s = at_s - centre_s
            return Rate(max(0.0, mean.per_s + slope * ahead_s), mean.sigma + deviation * ahead_s)
        return _mean(self._recent(self._level_s))

    def _recent(self, over_s: float) -> list[tuple[float, float, float]]:
        since_s = self._seen[-1][0] - over_s
        return [each for each in self._seen if each[0] > since_s]

    def _fit_wave(self) -> _Wave | None:
        """The period that explains the history best, if one explains it down to the noise."""
        first_s, last_s = self._seen[0][0], self._seen[-1][0]
        longest_s = (last_s - first_s) / _PERIODS
        if longest_s < _SHORTEST_S:
            return None
        best: tuple[float, _Wave] | None = None
        for step in range(_STEPS):
            period_s = _SHORTEST_S * (longest_s / _SHORTEST_S) ** (step / (_STEPS - 1))
            found = _wave(list(self._seen), 2 * math.pi / period_s)
            if found is not None and (best is None or found[0] < best[0]):
                best = found
        if best is None:
            return None
        residual, wave = best
        # Counts of a Poisson process vary by their mean.
        noise = sum(count / over_s**2 for _, over_s, count in self._seen) / len(self._seen)
        amplitude = math.hypot(wave.cosine, wave.sine)
        if residual > 2 * noise or amplitude < _SIGNIFICANT * wave.sigma:
            return None
        return wave


def _mean(seen: list[tuple[float, float, float]]) -> Rate:
    over_s = sum(each[1] for each in seen)
    count = sum(each[2] for each in seen)
    return Rate(count / over_s, math.sqrt(max(count, 1.0)) / over_s if count else 0.0)


def _slope(seen: list[tuple[float, float, float]]) -> tuple[float, float]:
    """(change of the rate per second, its standard deviation if the counts are Poisson's)."""
    if len(seen) < 4:
        return 0.0, 0.0
    centre_s = sum(each[0] for each in seen) / len(seen)
    spread = sum((each[0] - centre_s) ** 2 for each in seen)
    slope = sum((each[0] - centre_s) * each[2] / each[1] for each in seen) / spread
    noise = sum(max(each[2], 1.0) / each[1] ** 2 for each in seen) / len(seen)
    return slope, math.sqrt(noise / spread)


def _wave(seen: list[tuple[float, float, float]], omega: float) -> tuple[float, _Wave] | None:
    """(mean squared residual, least squares fit) at one frequency."""
    rows = [(1.0, math.cos(omega * at_s), math.sin(omega * at_s), count / over_s) for at_s, over_s, count in seen]
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(4)] for i in range(3)]
    for i in range(3):
        pivot = matrix[i][i]
        if abs(pivot) < 1e-9:
            return None
        for j in range(i + 1, 3):
            factor = matrix[j][i] / pivot
            for k in range(i, 4):
                matrix[j][k] -= factor * matrix[i][k]
    solved = [0.0, 0.0, 0.0]
    for i in (2, 1, 0):
        solved[i] = (matrix[i][3] - sum(matrix[i][j] * solved[j] for j in range(i + 1, 3))) / matrix[i][i]
    mean, cosine, sine = solved
    residual = sum((row[3] - mean - cosine * row[1] - sine * row[2]) ** 2 for row in rows) / len(rows)
    return residual, _Wave(omega, mean, cosine, sine, math.sqrt(3 * residual / len(rows)))
