"""Flips the roles of workers when more requests would meet their SLO.

The controller predicts, for every split of the workers, which share of the observed demand would meet its SLO, and
moves one worker at a time towards the best split, if that is worth it and stays so. A constant demand has one best
split, so the controller comes to rest there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from twostroke.policy.attainment import Demand, Member, Predictor, Role, Split, split_of


class Mode(Enum):
    """What the controller may do."""

    OFF = "off"
    ADVISE = "advise"
    """Says what it would do."""
    ON = "on"


@dataclass(frozen=True, slots=True)
class RatioSettings:
    """How eager the controller is.

    gain: share of requests that must be won. hold_s: for how long that must be so. dwell_s: between the end of a flip
    and the next one's beginning. drain_s: how long a worker may go on with its old work before its role is set.
    both: whether workers may become both; not where placement lets none serve a whole request.
    """

    mode: Mode = Mode.ADVISE
    gain: float = 0.05
    hold_s: float = 30.0
    dwell_s: float = 120.0
    drain_s: float = 120.0
    both: bool = True


class Do(Enum):
    """What a router does for the controller."""

    NOTHING = "nothing"
    DRAIN = "drain"
    """Send the worker nothing more; it finishes what it has."""
    SET_ROLE = "set role"
    """It is empty, or was given time enough: set the role and send it requests again."""
    KEEP_ROLE = "keep role"
    """The flip is off; send it requests as before."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now. why: one line with the numbers."""

    do: Do
    worker: str = ""
    role: Role | None = None
    why: str = ""


@dataclass(slots=True)
class _Flip:
    worker: str
    role: Role
    since_s: float


class RoleController:
    """One per cluster. Ask it every few seconds and carry out what it decides."""

    def __init__(self, settings: RatioSettings | None = None) -> None:
        self._settings = settings or RatioSettings()
        self._flip: _Flip | None = None
        self._wanted: Split | None = None
        self._wanted_since_s = 0.0
        self._rest_until_s = float("-inf")

    def decide(self, members: Sequence[Member], demand: Demand, now_s: float) -> Decision:
        """members: all ready workers, the one that drains included. now_s: of the monotonic clock."""
        if self._settings.mode is Mode.OFF or not members:
            return Decision(Do.NOTHING)
        if self._flip is not None:
            return self._go_on(self._flip, members, now_s)
        now = split_of(members)
        predictor = Predictor(members[0], demand)
        best, share = best_split(now, predictor, both=self._settings.both)
        here = predictor.share(now)
        why = f"{now} meets the SLO for {here:.1%} of {demand.requests_per_s:.2g} requests/s, {best} for {share:.1%}"
        if share - here < self._settings.gain:
            self._wanted = None
            return Decision(Do.NOTHING, why=why)
        step = _towards(now, best)
        if self._wanted is None or _towards(now, self._wanted) != step:
            self._wanted_since_s = now_s
        self._wanted = best
        if now_s - self._wanted_since_s < self._settings.hold_s or now_s < self._rest_until_s:
            return Decision(Do.NOTHING, why=why)
        old, new = step
        worker = min((each for each in members if each.role is old), key=lambda each: (each.load, each.worker)).worker
        if self._settings.mode is Mode.ADVISE:
            return Decision(Do.NOTHING, worker, new, f"{why}; {worker} should become {new.value}")
        why = f"{why}; {worker} becomes {new.value}"
        if Role.BOTH in step:
            # What it still holds of its old role goes on; nobody has to do without the worker.
            self._end(now_s)
            return Decision(Do.SET_ROLE, worker, new, why)
        if not _serve_without(worker, members):
            return Decision(Do.NOTHING, why=f"{why}, but nobody could serve while it drains")
        self._flip = _Flip(worker, new, now_s)
        return Decision(Do.DRAIN, worker, new, why)

    def _go_on(self, flip: _Flip, members: Sequence[Member], now_s: float) -> Decision:
        member = next((each for each in members if each.worker == flip.worker), None)
        if member is None or not _serve_without(flip.worker, members):
            # It went away, or another one did and it is needed as it was.
            self._end(now_s)
            return Decision(Do.KEEP_ROLE, flip.worker, why=f"{flip.worker} keeps its role: the cluster changed")
        if member.idle or now_s - flip.since_s >= self._settings.drain_s:
            self._end(now_s)
            return Decision(Do.SET_ROLE, flip.worker, flip.role, f"{flip.worker} is drained")
        return Decision(Do.NOTHING, why=f"{flip.worker} drains to become {flip.role.value}")

    def _end(self, now_s: float) -> None:
        self._flip = self._wanted = None
        self._rest_until_s = now_s + self._settings.dwell_s


def _serve_without(worker: str, members: Sequence[Member]) -> bool:
    roles = {member.role for member in members if member.worker != worker}
    return Role.BOTH in roles or {Role.PREFILL, Role.DECODE} <= roles


def _towards(now: Split, best: Split) -> tuple[Role, Role]:
    """The flip that leads there: from the role with most too many to the one with most too few."""
    excess = {
        Role.PREFILL: now.prefill - best.prefill,
        Role.DECODE: now.decode - best.decode,
        Role.BOTH: now.both - best.both,
    }
    return max(excess, key=excess.__getitem__), min(excess, key=excess.__getitem__)


FEW = 8
"""Up to so many workers all splits are compared; beyond, those with roles of two kinds."""


def _splits(now: Split, *, both: bool) -> Iterator[Split]:
    count = now.prefill + now.decode + now.both
    mixed = range(count + 1) if count <= FEW else sorted({0, now.both, count})
    for both_now in mixed if both else [now.both]:
        rest = count - both_now
        for prefill in range(rest + 1):
            split = Split(prefill, rest - prefill, both_now)
            if rest == 0 or (split.prefill and split.decode):
                yield split


def best_split(now: Split, predictor: Predictor, *, both: bool = True) -> tuple[Split, float]:
    """The split that meets most SLOs, and the share; among equals the one that takes the fewest flips. both: whether
    others may become both."""
    shares = {split: predictor.share(split) for split in {*_splits(now, both=both), now}}

    def flips(split: Split) -> int:
        return abs(split.prefill - now.prefill) + abs(split.decode - now.decode) + abs(split.both - now.both)

    best = max(shares, key=lambda split: (round(shares[split], 4), -flips(split), split.decode, split.both))
    return best, shares[best]
