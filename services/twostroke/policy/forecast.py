"""How many requests will arrive: from what arrived, its trend, and what comes back again and again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_PERIODS = 0.7
"""Periods that must have been seen before one is believed in."""
_SHORTEST_S = 300.0
_STEPS = 64
_SIGNIFICANT = 8.0
_REFIT_S = 60.0
_TREND = 5.0
"""Standard deviations from which on a trend is more than noise."""


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


@dataclass(frozen=True, slots=True)
class _Line:
    """rate(t) = mean + slope * (t - centre_s)."""

    centre_s: float
    mean: Rate
    slope: float
    deviation: float

    def at(self, at_s: float) -> Rate:
        ahead_s = at_s - self.centre_s
        return Rate(max(0.0, self.mean.per_s + self.slope * ahead_s), self.mean.sigma + self.deviation * ahead_s)


class Forecast:
    """Of one stream of arrivals, counted in intervals of about the same length.

    level_s: of history that a constant rate is estimated from. trend_s: that a trend is. Nothing that arrived counts as
    a rate of zero, not as unknown.
    """

    def __init__(self, level_s: float = 300.0, trend_s: float = 100.0, kept_s: float = 7200.0) -> None:
        self._level_s = level_s
        self._trend_s = trend_s
        self._kept_s = kept_s
        self._seen: deque[tuple[float, float, float]] = deque()
        """(middle, length, arrivals) of each interval."""
        self._level = Rate(0.0, 0.0)
        self._line: _Line | None = None
        self._wave: _Wave | None = None
        self._refit_at_s = 0.0

    def add(self, now_s: float, arrivals: int, over_s: float) -> None:
        """So many requests arrived in the over_s seconds before now."""
        self._seen.append((now_s - over_s / 2, over_s, float(arrivals)))
        while self._seen[0][0] < now_s - self._kept_s:
            self._seen.popleft()
        self._level = _mean(self._recent(self._level_s))
        # A steep trend shows in a short time, a gentle one only in a long one.
        self._line = _line(self._recent(self._trend_s)) or _line(self._recent(self._level_s))
        if now_s >= self._refit_at_s:
            # It looks at the whole history.
            self._refit_at_s = now_s + _REFIT_S
            self._wave = _fit_wave(self._seen)

    @property
    def periodic(self) -> bool:
        """Whether a period was found."""
        return self._wave is not None

    def at(self, at_s: float) -> Rate:
        """The rate at a time, now or later."""
        if self._wave is not None:
            return Rate(max(0.0, self._wave.at(at_s)), self._wave.sigma)
        return self._line.at(at_s) if self._line is not None else self._level

    def _recent(self, over_s: float) -> list[tuple[float, float, float]]:
        since_s = self._seen[-1][0] - over_s
        recent = []
        for each in reversed(self._seen):
            if each[0] <= since_s:
                break
            recent.append(each)
        return recent


def _mean(seen: Sequence[tuple[float, float, float]]) -> Rate:
    over_s = sum(each[1] for each in seen)
    count = sum(each[2] for each in seen)
    return Rate(count / over_s, math.sqrt(count) / over_s)


def _line(seen: Sequence[tuple[float, float, float]]) -> _Line | None:
    """The trend, where it is more than the noise of counts."""
    if len(seen) < 4:
        return None
    centre_s = sum(each[0] for each in seen) / len(seen)
    spread = sum((each[0] - centre_s) ** 2 for each in seen)
    slope = sum((each[0] - centre_s) * each[2] / each[1] for each in seen) / spread
    noise = sum(max(each[2], 1.0) / each[1] ** 2 for each in seen) / len(seen)
    deviation = math.sqrt(noise / spread)
    return _Line(centre_s, _mean(seen), slope, deviation) if abs(slope) > _TREND * deviation else None


def _fit_wave(seen: Sequence[tuple[float, float, float]]) -> _Wave | None:
    """The period that explains the history best, if one explains it down to the noise."""
    table = np.array(seen)
    times, rates = table[:, 0], table[:, 2] / table[:, 1]
    longest_s = float(times[-1] - times[0]) / _PERIODS
    if longest_s < _SHORTEST_S:
        return None
    # Counts of a Poisson process vary by their mean.
    noise = float((table[:, 2] / table[:, 1] ** 2).mean())
    if float(rates.var()) <= 2 * noise:
        return None
    best: _Wave | None = None
    least = math.inf
    for period_s in np.geomspace(_SHORTEST_S, longest_s, _STEPS):
        omega = 2 * math.pi / float(period_s)
        columns = np.stack([np.ones_like(times), np.cos(omega * times), np.sin(omega * times)], axis=1)
        found = np.linalg.lstsq(columns, rates, rcond=None)[0]
        residual = float(((rates - columns @ found) ** 2).mean())
        if residual < least:
            least = residual
            mean, cosine, sine = (float(each) for each in found)
            best = _Wave(omega, mean, cosine, sine, math.sqrt(3 * residual / len(times)))
    if best is None or least > 2 * noise or math.hypot(best.cosine, best.sine) < _SIGNIFICANT * best.sigma:
        return None
    return best
