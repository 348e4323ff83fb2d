"""Screens all configurations, simulates the best of them, and looks for what would change the answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from twostroke.measures import SloLimits
from twostroke.sim.cluster import Cluster
from twostroke.sim.limits import Limits
from twostroke.sim.planner.errors import Scaled
from twostroke.sim.planner.screen import Load, Screener, best
from twostroke.sim.planner.space import Config, Space
from twostroke.sim.scenario import FleetSpec, make_placer
from twostroke.sim.summary import Summary, summarise
from twostroke.sim.traffic import Traffic
from twostroke.sim.traffic_made import rescaled


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: which configuration serves this traffic within this SLO for the least money.

    target: share of requests that must meet the SLO. links: hops and links of every candidate.
    """

    traffic: Traffic
    slo: SloLimits
    links: FleetSpec
    target: float = 0.99


@dataclass(frozen=True, slots=True)
class Trial:
    """One simulation to make. factor: of the arrival rate; most: requests; speed: prefill and decode step times'."""

    config: Config
    slo: SloLimits
    factor: float = 1.0
    most: int = 0
    speed: tuple[float, float] = (1.0, 1.0)
    link_factor: float = 1.0
    prompt_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A configuration and what its simulation came down to."""

    config: Config
    found: Summary

    def rank(self, target: float) -> tuple[float, ...]:
        """Of those that meet the target the cheapest, then the quickest; of the others the one with most good."""
        if self.found.attainment >= target:
            return 0.0, round(self.config.dollars_per_hour, 2), -self.found.attainment, self.found.ttft.p99
        return 1.0, -self.found.goodput, self.config.dollars_per_hour


def try_out(question: Question, trial: Trial) -> Summary:
    """Simulates one trial."""
    traffic = question.traffic
    if trial.factor != 1 or trial.most or trial.prompt_factor != 1:
        traffic = rescaled(traffic, trial.factor, trial.most)
    if trial.prompt_factor != 1:
        traffic.prompt_tokens = type(traffic.prompt_tokens)(
            "q", (max(1, round(tokens * trial.prompt_factor)) for tokens in traffic.prompt_tokens)
        )
        traffic.hashes = ()
    fleet = trial.config.fleet(question.links).make(traffic)
    if trial.speed != (1.0, 1.0):
        fleet = replace(
            fleet,
            groups=[
                replace(group, kind=replace(group.kind, limits=_scaled(group.kind.limits, trial.speed)))
                for group in fleet.groups
            ],
        )
    if trial.link_factor != 1:
        fleet = replace(fleet, link=replace(fleet.link, bytes_per_s=fleet.link.bytes_per_s * trial.link_factor))
    placer = make_placer(trial.config.policy, fleet, traffic, trial.slo)
    cluster = Cluster(fleet, traffic, placer, gap_limit_s=trial.slo.itl_s)
    if not cluster.run():
        raise KeyboardInterrupt
    return summarise(cluster, trial.slo)


def _scaled(limits: Limits, speed: tuple[float, float]) -> Limits:
    return Limits(
        Scaled(limits.model, *speed),
        blocks=limits.blocks,
        block_tokens=limits.block_tokens,
        budget_tokens=limits.budget_tokens,
        sequences=limits.sequences,
        unit_tokens=limits.unit_tokens,
    )


@dataclass
class Lab:
    """Runs trials, several at a time where there are cores. done: told after each."""

    question: Question
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    done: Callable[[], None] = lambda: None
    finished: list[tuple[Trial, Summary]] = field(default_factory=list)
    """All that was simulated."""
    _pool: ProcessPoolExecutor | None = None

    @contextmanager
    def open(self) -> Iterator[Lab]:
        """Processes live as long as this."""
        if self.processes < 2:
            yield self
            return
        _Worker.question = self.question
        self._pool = ProcessPoolExecutor(self.processes, initializer=_Worker.begin, initargs=(self.question,))
        try:
            yield self
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def run(self, trials: Sequence[Trial]) -> list[Summary]:
        """The summaries, in order."""
        results = []
        found = self._pool.map(_Worker.run, trials) if self._pool else (try_out(self.question, each) for each in trials)
        for trial, summary in zip(trials, found, strict=True):
            results.append(summary)
            self.finished.append((trial, summary))
            self.done()
        return results


class _Worker:
    """State of a process of the lab: the traffic is sent once, not with every trial."""

    question: Question

    @classmethod
    def begin(cls, question: Question) -> None:
        import signal

        # Ctrl-C is for the parent, which ends its pool.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        cls.question = question

    @staticmethod
    def run(trial: Trial) -> Summary:
        return try_out(_Worker.question, trial)


@dataclass(slots=True)
class Found:
    """What a search came to. candidates: simulated, best first."""

    screened: int
    candidates: list[Candidate] = field(default_factory=list)

    def first(self, two_pools: bool) -> Candidate | None:
        """The best of one shape."""
        return next((each for each in self.candidates if each.config.two_pools == two_pools), None)


def so_far(lab: Lab) -> Found:
    """What an interrupted search had come to: the unchanged traffic's simulations, best first."""
    plain = (1.0, (1.0, 1.0), 1.0, 1.0, lab.question.slo)
    first: dict[Config, Summary] = {}
    for trial, summary in lab.finished:
        if (trial.factor, trial.speed, trial.link_factor, trial.prompt_factor, trial.slo) == plain:
            first.setdefault(trial.config, summary)
    candidates = [Candidate(config, summary) for config, summary in first.items()]
    return Found(0, sorted(candidates, key=lambda each: each.rank(lab.question.target)))


def search(lab: Lab, space: Space, simulated: int, say: Callable[[str], None], most: int = 0) -> Found:
    """Screens the space and simulates the best `simulated` of it, each on at most `most` requests."""
    question = lab.question
    screener = Screener(Load.of(question.traffic), question.slo)
    screened = [screener.screen(config) for config in space.configs()]
    say(f"{len(screened):,} configurations screened")
    chosen = [each.config for each in best(screened, question.target, simulated, max(2, simulated // 3))]
    found = Found(len(screened))
    summaries = lab.run([Trial(config, question.slo, most=most) for config in chosen])
    found.candidates = [Candidate(config, summary) for config, summary in zip(chosen, summaries, strict=True)]
    flexible = [
        replace(each.config, policy="all")
        for each in sorted(found.candidates, key=lambda each: each.rank(question.target))
        if each.config.two_pools
    ][:4]
    summaries = lab.run([Trial(config, question.slo, most=most) for config in flexible])
    found.candidates += [Candidate(config, summary) for config, summary in zip(flexible, summaries, strict=True)]
    found.candidates.sort(key=lambda each: each.rank(question.target))
    say(f"{len(found.candidates)} of them simulated")
    return found
