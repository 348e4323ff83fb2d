"""Traffic that is made up: arrivals by a process, lengths fixed, drawn or taken from a trace."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.errors import ConfigError
from twostroke.sim.servegen import gap_s
from twostroke.sim.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Lengths:
    """Prompt and answer lengths in tokens. cv: of both, log-normally distributed; 0 keeps them fixed."""

    prompt_tokens: int
    output_tokens: int
    cv: float = 0.0

    def draw(self, source: random.Random) -> tuple[int, int]:
        """One request's."""
        return self._draw(source, self.prompt_tokens), self._draw(source, self.output_tokens)

    def _draw(self, source: random.Random, mean: int) -> int:
        if not self.cv:
            return mean
        variance = math.log(1 + self.cv * self.cv)
        return max(1, round(source.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))))


def parse_lengths(text: str) -> Lengths:
    """From "8192/256" or "8192/256/0.5", the last with a CV. Raises ConfigError."""
    parts = text.split("/")
    try:
        lengths = Lengths(int(parts[0]), int(parts[1]), float(parts[2]) if len(parts) > 2 else 0.0)
    except (ValueError, IndexError):
        raise ConfigError(
            f"lengths {text!r}: write PROMPT/ANSWER in tokens, such as 8192/256 or 8192/256/0.5"
        ) from None
    if min(lengths.prompt_tokens, lengths.output_tokens) < 1 or lengths.cv < 0 or len(parts) > 3:
        raise ConfigError(f"lengths {text!r}: prompt and answer have at least one token, a CV is not negative")
    return lengths


def steady(
    lengths: Lengths, rate: float, seconds: float, *, cv: float = 1.0, seed: int = 1, most: int = 10_000_000
) -> Traffic:
    """Arrivals of a constant mean rate per second: Poisson with a CV of 1, burstier above, more even below."""
    return _made(lengths, lambda source, at_s: gap_s(source, rate, cv), seconds, seed, f"{rate:g}/s", most)


def sine(lengths: Lengths, low: float, high: float, period_s: float, seconds: float, *, seed: int = 1) -> Traffic:
    """A Poisson process whose rate swings between low and high like a sine, from low on."""
    middle, swing = (low + high) / 2, (high - low) / 2

    def gap(source: random.Random, at_s: float) -> float:
        # Thinning: candidates at the highest rate, kept as often as the rate then and there asks for.
        passed_s = 0.0
        while True:
            passed_s += source.expovariate(high)
            rate = middle - swing * math.cos(2 * math.pi * (at_s + passed_s) / period_s)
            if source.random() * high <= rate or at_s + passed_s > seconds:
                return passed_s

    return _made(lengths, gap, seconds, seed, f"{low:g} to {high:g}/s")


def closed_loop(lengths: Lengths, concurrency: int, requests: int, *, seed: int = 1) -> Traffic:
    """`concurrency` requests at any time; the next one arrives when one is complete."""
    source = random.Random(seed)  # noqa: S311
    traffic = Traffic(name=f"{concurrency} at a time", concurrency=concurrency)
    for _ in range(requests):
        _append(traffic, 0.0, lengths.draw(source))
    return traffic


def rescaled(traffic: Traffic, factor: float, most: int = 0) -> Traffic:
    """The same requests, arriving `factor` times as fast; only the first `most` of them unless that is 0."""
    count = min(most, len(traffic)) if most else len(traffic)
    return Traffic(
        arrival_s=array("d", (at_s / factor for at_s in traffic.arrival_s[:count])),
        prompt_tokens=traffic.prompt_tokens[:count],
        output_tokens=traffic.output_tokens[:count],
        hashes=traffic.hashes[:count],
        unit_tokens=traffic.unit_tokens,
        concurrency=traffic.concurrency,
        name=traffic.name,
    )


def _made(
    lengths: Lengths,
    gap: Callable[[random.Random, float], float],
    seconds: float,
    seed: int,
    name: str,
    most: int = 10_000_000,
) -> Traffic:
    source = random.Random(seed)  # noqa: S311
    traffic = Traffic(name=f"{lengths.prompt_tokens}/{lengths.output_tokens} at {name}")
    at_s = 0.0
    while (at_s := at_s + gap(source, at_s)) < seconds and len(traffic) < most:
        _append(traffic, at_s, lengths.draw(source))
    return traffic


def _append(traffic: Traffic, at_s: float, lengths: tuple[int, int]) -> None:
    traffic.arrival_s.append(at_s)
    traffic.prompt_tokens.append(lengths[0])
    traffic.output_tokens.append(lengths[1])
