"""How many workers of each role there should be.

Demand is what arrives, never what is completed, so that a queue that grows is not mistaken for a small demand; nothing
arriving is a demand of zero. Workers are started for the rate that is expected when they will be ready. One is taken
away only when the others can take over its load, with room to spare, at any time until another one could be ready; so
a constant demand comes to rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from twostroke.policy.attainment import Demand, Member, Predictor, Role, Split
from twostroke.policy.forecast import Forecast


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How the controller weighs.

    start_s: from the decision to start a worker until it serves. share: of what endless workers would achieve. spare:
    share of the demand by which the workers that stay must be able to take more before one goes. deviations: of the
    rate's estimate, added to it before one goes. hold_s: for how long one must be too many where a period was found,
    unsure_hold_s: elsewhere. drain_backlog_s: in which a queue is to be gone. least, most: of each role. stuck: times
    start_s after which a worker that does not come up counts no more.
    """

    start_s: float = 180.0
    share: float = 0.97
    spare: float = 0.15
    deviations: float = 3.0
    hold_s: float = 60.0
    unsure_hold_s: float = 300.0
    drain_backlog_s: float = 60.0
    least: int = 1
    most: int = 1000
    stuck: float = 2.0


@dataclass(frozen=True, slots=True)
class Have:
    """Workers of one role. starting_s: for how long each that is not ready yet has been starting."""

    ready: int = 0
    starting_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Seen:
    """What happened in the interval before a decision. waiting: requests without a first token."""

    now_s: float
    over_s: float
    arrivals: int
    waiting: int
    have: Mapping[Role, Have]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The decision: how many workers to start (positive) or to drain (negative), by role. why: one line."""

    change: Mapping[Role, int]
    why: str = ""


class Decider(Protocol):
    """Decides how many workers there should be."""

    def decide(self, seen: Seen) -> Wanted:
        """What to start and what to drain now."""
        ...


@dataclass(slots=True)
class Need:
    """Fewest workers of a role for a rate, remembered."""

    like: Member
    demand: Demand
    settings: ReplicaSettings
    _known: dict[tuple[Role, int], int] = field(default_factory=dict)

    def of(self, role: Role, per_s: float) -> int:
        """At least settings.least, even for no demand at all."""
        key = (role, round(per_s * 50))
        if key not in self._known:
            self._known[key] = self._search(role, key[1] / 50)
        return self._known[key]

    def _search(self, role: Role, per_s: float) -> int:
        least, most = self.settings.least, self.settings.most
        if per_s <= 0:
            return least
        predictor = Predictor(self.like, replace(self.demand, requests_per_s=per_s))
        goal = self.settings.share * predictor.share(_split(role, 4 * most, 4 * most))
        low, high = least, most
        while low < high:
            middle = (low + high) // 2
            if predictor.share(_split(role, middle, 4 * most)) >= goal:
                high = middle
            else:
                low = middle + 1
        return low


def _split(role: Role, count: int, plenty: int) -> Split:
    """So many of one role, and plenty of the other."""
    if role is Role.PREFILL:
        return Split(count, plenty, 0)
    return Split(plenty, count, 0) if role is Role.DECODE else Split(0, 0, count)


class ReplicaController:
    """One per cluster. Ask it at even intervals and carry out what it decides.

    like: a worker whose step model and sizes stand for all of a role. demand: what a request is like; its rate does
    not count. Both may be changed between decisions, as they are observed.
    """

    def __init__(self, like: Mapping[Role, Member], demand: Demand, settings: ReplicaSettings | None = None) -> None:
        self.settings = settings or ReplicaSettings()
        self._needs = {role: Need(member, demand, self.settings) for role, member in like.items()}
        self._forecast = Forecast()
        self._too_many_since_s: dict[Role, float] = {}

    def decide(self, seen: Seen) -> Wanted:
        """What to start and what to drain now."""
        settings = self.settings
        self._forecast.add(seen.now_s, seen.arrivals, seen.over_s)
        ready_s = seen.now_s + settings.start_s + seen.over_s
        later = max(self._forecast.at(ready_s).per_s, self._forecast.at(ready_s + seen.over_s).per_s)
        backlog = max(0.0, seen.waiting - seen.over_s * self._forecast.at(seen.now_s).per_s)
        now = self._forecast.at(seen.now_s)
        pressing = now.per_s + backlog / settings.drain_backlog_s
        change = {}
        for role, need in self._needs.items():
            have = seen.have.get(role, Have())
            coming = sum(1 for since_s in have.starting_s if since_s <= settings.stuck * settings.start_s)
            total = have.ready + coming
            wanted = max(need.of(role, later), need.of(role, pressing) if backlog > 0 else 0)
            wanted = min(max(wanted, settings.least), settings.most)
            if wanted > total:
                change[role] = wanted - total
                self._too_many_since_s.pop(role, None)
            elif self._too_many(role, need, total, seen):
                change[role] = -1
        why = f"{now.per_s:.2f} requests/s now, {later:.2f} in {settings.start_s:.0f} s, backlog {backlog:.0f}"
        return Wanted(change, why)

    def _too_many(self, role: Role, need: Need, total: int, seen: Seen) -> bool:
        """Whether the others could do without one, all the while until a new one could be there."""
        settings = self.settings
        steps = max(1, round((settings.start_s + settings.hold_s) / seen.over_s))
        spare = 1 + (settings.spare / 3 if self._forecast.periodic else settings.spare)
        highest = max(
            self._forecast.at(seen.now_s + step * seen.over_s).high(settings.deviations) for step in range(steps + 1)
        )
        if total <= settings.least or need.of(role, highest * spare) >= total:
            self._too_many_since_s.pop(role, None)
            return False
        since_s = self._too_many_since_s.setdefault(role, seen.now_s)
        return seen.now_s - since_s >= (settings.hold_s if self._forecast.periodic else settings.unsure_hold_s)
