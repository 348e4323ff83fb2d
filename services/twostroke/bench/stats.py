"""What many measurements come down to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.bench.stacks import DIRECT

GROUPS = ("router", "front_ends", "engines")


@dataclass(frozen=True, slots=True)
class Sample:
    """One measurement of one system: some seconds at one number of streams."""

    system: str
    streams: int
    round: int
    ttfts_s: tuple[float, ...]
    """One per answer."""
    tokens: int
    events: int
    """Server-sent events that brought them; fewer than tokens where several came in one."""
    duration_s: float
    cpu_s: dict[str, float]
    """Of each of GROUPS, and of "client"."""

    def us_per_token(self, *groups: str) -> float:
        """CPU time of the groups together, in microseconds per token that was streamed."""
        return sum(self.cpu_s[group] for group in groups) / self.tokens * 1e6

    @property
    def front_us(self) -> float:
        """CPU per token of everything but the engines."""
        return self.us_per_token("router", "front_ends")


@dataclass(frozen=True, slots=True)
class Cell:
    """Medians over the rounds of one system at one number of streams."""

    system: str
    streams: int
    answers: int
    ttft_ms: float
    """Median over all answers of all rounds."""
    ttft_ms_low: float
    ttft_ms_high: float
    """The smallest and the largest of the rounds' medians: how far noise carries."""
    tokens_per_s: float
    router_us: float
    front_us: float
    """Router and everything that fronts an engine."""
    engine_us: float
    client_us: float
    tokens_per_event: float


@dataclass(frozen=True, slots=True)
class Added:
    """What a system costs over the direct one."""

    ttft_ms: float
    front_us: float


def cell(samples: Sequence[Sample]) -> Cell:
    """Comes down to one cell. The samples are of one system and one number of streams; at least one."""
    rounds_ms = [statistics.median(sample.ttfts_s) * 1e3 for sample in samples]
    return Cell(
        system=samples[0].system,
        streams=samples[0].streams,
        answers=sum(len(sample.ttfts_s) for sample in samples),
        ttft_ms=statistics.median(ttft for sample in samples for ttft in sample.ttfts_s) * 1e3,
        ttft_ms_low=min(rounds_ms),
        ttft_ms_high=max(rounds_ms),
        tokens_per_s=statistics.median(sample.tokens / sample.duration_s for sample in samples),
        router_us=_median_us(samples, "router"),
        front_us=statistics.median(sample.front_us for sample in samples),
        engine_us=_median_us(samples, "engines"),
        client_us=_median_us(samples, "client"),
        tokens_per_event=sum(sample.tokens for sample in samples) / sum(sample.events for sample in samples),
    )


def _median_us(samples: Sequence[Sample], group: str) -> float:
    return statistics.median(sample.us_per_token(group) for sample in samples)


def cells(samples: Iterable[Sample]) -> list[Cell]:
    """All cells, by streams, in the order in which the systems first appear."""
    found: dict[tuple[int, str], list[Sample]] = {}
    for sample in samples:
        found.setdefault((sample.streams, sample.system), []).append(sample)
    order = {system: index for index, system in enumerate(dict.fromkeys(system for _, system in found))}
    return [cell(found[key]) for key in sorted(found, key=lambda key: (key[0], order[key[1]]))]


def added(made: Sequence[Cell], system: str, streams: int) -> Added | None:
    """The differences of a system's medians to the direct one's; None when either was not measured."""
    by_name = {each.system: each for each in made if each.streams == streams}
    own, direct = by_name.get(system), by_name.get(DIRECT)
    if own is None or direct is None:
        return None
    return Added(own.ttft_ms - direct.ttft_ms, own.front_us - direct.front_us)
