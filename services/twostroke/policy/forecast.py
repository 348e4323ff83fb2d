"""How many requests will arrive: from what arrived, its trend, and what comes back again and again.

The only module of policy/ that needs numpy: it fits some fifty frequencies to hours of counts, once a minute. Nothing
that a router imports to place requests imports it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_Floats = npt.NDArray[np.float64]
_PERIODS = 0.7
"""Periods that must have been seen before one is believed in."""
_SURE = 1.5
"""Periods after which it is believed in alone."""
_SHORTEST_S = 300.0
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
    def _span_s(self) -> float:
        return self._seen[-1][0] - self._seen[0][0]

    @property
    def periodic(self) -> bool:
        """Whether a period was found."""
        return self._wave is not None

    def at(self, at_s: float) -> Rate:
        """The rate at a time, now or later."""
        if self._wave is not None:
            wave = Rate(max(0.0, self._wave.at(at_s)), self._wave.sigma)
            # Half of a wave and a plain rise look alike.
            if self._line is not None and self._wave.omega * self._span_s < 2 * math.pi * _SURE:
                return max(wave, self._line.at(at_s), key=lambda rate: rate.per_s)
            return wave
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
    span_s = float(times[-1] - times[0])
    if span_s < _PERIODS * _SHORTEST_S:
        return None
    # Counts of a Poisson process vary by their mean.
    noise = float((table[:, 2] / table[:, 1] ** 2).mean())
    if float(rates.var()) <= 2 * noise:
        return None
    # Over the whole history two neighbouring frequencies come apart by a quarter of a turn.
    step = 0.25 / span_s
    coarse = np.arange(_PERIODS / span_s, 1 / _SHORTEST_S + step, step)
    least, best = min(_fit_at(times, rates, float(each)) for each in coarse)
    fine = best + step * np.linspace(-1, 1, 9)
    least, best = min(_fit_at(times, rates, float(each)) for each in fine if each > 0)
    wave = _wave_at(times, rates, best, least)
    if least > 2 * noise or math.hypot(wave.cosine, wave.sine) < _SIGNIFICANT * wave.sigma:
        return None
    return wave


def _columns(times: _Floats, frequency: float) -> _Floats:
    angle = 2 * math.pi * frequency * times
    return np.stack([np.ones_like(times), np.cos(angle), np.sin(angle)], axis=1)


def _fit_at(times: _Floats, rates: _Floats, frequency: float) -> tuple[float, float]:
    """(mean squared residual, frequency)"""
    columns = _columns(times, frequency)
    found = np.linalg.lstsq(columns, rates, rcond=None)[0]
    return float(((rates - columns @ found) ** 2).mean()), frequency


def _wave_at(times: _Floats, rates: _Floats, frequency: float, residual: float) -> _Wave:
    mean, cosine, sine = np.linalg.lstsq(_columns(times, frequency), rates, rcond=None)[0]
    sigma = math.sqrt(3 * residual / len(times))
    return _Wave(2 * math.pi * frequency, float(mean), float(cosine), float(sine), sigma)
