"""The controllers of replica counts and of roles, at work on a simulated fleet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from twostroke.measures import SloLimits
from twostroke.policy.attainment import Demand, Member
from twostroke.policy.attainment import Role as PolicyRole
from twostroke.policy.ratio import Do, RatioSettings, RoleController
from twostroke.policy.replicas import Decider, Have, Need, ReplicaController, ReplicaSettings, Seen, Wanted
from twostroke.policy.snapshot import Slo
from twostroke.sim.cluster import Cluster
from twostroke.sim.fleet import ROLES, WorkerKind
from twostroke.sim.recorder import UNSET
from twostroke.sim.traffic import Traffic
from twostroke.sim.worker import State, Worker

_SMOOTHED = 12
"""Intervals over which the demand is averaged for the roles."""
_BIN_S = 30.0
_ROLES = {role.value: role for role in PolicyRole}


@dataclass(frozen=True, slots=True)
class Scaling:
    """What to control. replicas: None leaves the counts. ratio: None leaves the roles.

    starts: whether the n-th start of a worker succeeds; one that fails never gets ready and is never told of.
    """

    replicas: ReplicaSettings | None = None
    ratio: RatioSettings | None = None
    interval_s: float = 10.0
    clairvoyant: bool = False
    """Whether the counts are decided by one that knows what will arrive: the yardstick."""
    starts: Callable[[int], bool] = lambda number: True


@dataclass(slots=True)
class Clairvoyant:
    """Starts workers so that they are ready when the traffic to come needs them, and keeps none that it does not."""

    like: Mapping[PolicyRole, Member]
    demand: Demand
    settings: ReplicaSettings
    counts: Sequence[int]
    """Arrivals in each interval of _BIN_S."""

    @staticmethod
    def of(traffic: Traffic) -> Callable[[Mapping[PolicyRole, Member], Demand, ReplicaSettings], Clairvoyant]:
        """One that knows this traffic."""
        counts = [0] * (int(traffic.span_s // _BIN_S) + 1)
        for at_s in traffic.arrival_s:
            counts[int(at_s // _BIN_S)] += 1
        return lambda like, demand, settings: Clairvoyant(like, demand, settings, counts)

    def decide(self, seen: Seen) -> Wanted:
        """See Decider."""
        ready_s = seen.now_s + self.settings.start_s
        change = {}
        for role, member in self.like.items():
            need = Need(member, self.demand, self.settings)
            have = seen.have[role]
            total = have.ready + len(have.starting_s)
            later = need.of(role, self._highest(ready_s, ready_s + 2 * seen.over_s))
            until = need.of(role, self._highest(seen.now_s, ready_s + 2 * seen.over_s))
            if later > total:
                change[role] = later - total
            elif until < total:
                change[role] = -1
        return Wanted(change)

    def _highest(self, since_s: float, until_s: float) -> float:
        window = self.counts[int(since_s // _BIN_S) : int(until_s // _BIN_S) + 1]
        return max(window, default=0) / _BIN_S


@dataclass(slots=True)
class Autoscaler:
    """Attached to a cluster before it runs.

    changes: (time, role, +1 or -1) of every start and drain, and (time, role, 0) of every flip to a role.
    counts: (time, role, ready and starting workers).
    """

    cluster: Cluster
    scaling: Scaling
    slo: SloLimits
    changes: list[tuple[float, str, int]] = field(default_factory=list)
    counts: list[tuple[float, str, int]] = field(default_factory=list)
    _demand: Demand = field(default_factory=lambda: Demand(0.0, 1.0, 1.0, Slo()))
    _seen: int = 0
    _started: int = 0
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=_SMOOTHED))
    _replicas: Decider | None = None
    _ratio: RoleController | None = None
    _kinds: dict[PolicyRole, WorkerKind] = field(default_factory=dict)

    def attach(self) -> None:
        """Begins to decide, every interval of virtual time."""
        cluster = self.cluster
        for group in cluster.fleet.groups:
            self._kinds.setdefault(_ROLES[group.role.name], group.kind)
        self._demand = self._usual()
        if self.scaling.replicas is not None:
            like = {role: self._like(role, kind) for role, kind in self._kinds.items()}
            make = Clairvoyant.of(cluster.traffic) if self.scaling.clairvoyant else ReplicaController
            self._replicas = make(like, self._demand, self.scaling.replicas)
        if self.scaling.ratio is not None:
            self._ratio = RoleController(self.scaling.ratio)
        cluster.send(self.scaling.interval_s, self._tick, None)

    def _like(self, role: PolicyRole, kind: WorkerKind) -> Member:
        limits = kind.limits
        return Member(
            role.value,
            role,
            limits.model,
            kv_tokens=min(limits.blocks * limits.block_tokens, 1 << 40),
            step_budget_tokens=limits.budget_tokens,
        )

    def _usual(self) -> Demand:
        """What a request is like, of one request per second."""
        traffic = self.cluster.traffic
        count = max(1, len(traffic))
        prompts = sum(traffic.prompt_tokens) / count
        variance = sum((tokens - prompts) ** 2 for tokens in traffic.prompt_tokens) / count
        slo = Slo(self.slo.ttft_s or Slo().ttft_s, self.slo.itl_s or self.slo.tpot_s or Slo().itl_s)
        return Demand(1.0, prompts, sum(traffic.output_tokens) / count, slo, prompt_cv2=variance / prompts**2)

    def _tick(self, _: object, now_s: float) -> None:
        cluster, interval_s = self.cluster, self.scaling.interval_s
        cluster.send(now_s + interval_s, self._tick, None)
        arrivals = cluster.arrived - self._seen
        self._seen = cluster.arrived
        if self._replicas is not None:
            self._scale(now_s, arrivals)
        if self._ratio is not None:
            self._flip(now_s, arrivals / interval_s)

    def _scale(self, now_s: float, arrivals: int) -> None:
        assert self._replicas is not None
        have = {role: self._have(role, now_s) for role in self._kinds}
        seen = Seen(now_s, self.scaling.interval_s, arrivals, self._waiting(), have)
        for role, change in self._replicas.decide(seen).change.items():
            for _ in range(change):
                self._start(role, now_s)
            if change < 0:
                self._drain(role, now_s)
        for role in self._kinds:
            now = self._have(role, now_s)
            self.counts.append((now_s, role.value, now.ready + len(now.starting_s)))

    def _have(self, role: PolicyRole, now_s: float) -> Have:
        mine = [worker for worker in self.cluster.workers if worker.role.name == role.value]
        starting = [now_s - worker.since_s for worker in mine if worker.state is State.STARTING]
        return Have(sum(worker.state is State.READY for worker in mine), starting)

    def _waiting(self) -> int:
        """Requests without a first token."""
        first_s = self.cluster.records.first_s
        flying = sum(first_s[request] == UNSET for request in self.cluster.flights)
        return flying + len(self.cluster.parked)

    def _start(self, role: PolicyRole, now_s: float) -> None:
        self._started += 1
        kind = self._kinds[role]
        start_s = kind.start_s if self.scaling.starts(self._started) else float("inf")
        self.cluster.add_worker(kind, ROLES[role.value], start_s)
        self.changes.append((now_s, role.value, 1))

    def _drain(self, role: PolicyRole, now_s: float) -> None:
        """One that starts still, or the ready one with least to do."""
        mine = [worker for worker in self.cluster.workers if worker.role.name == role.value]
        starting = [worker for worker in mine if worker.state is State.STARTING]
        ready = [worker for worker in mine if worker.state is State.READY]
        chosen = starting[-1] if starting else min(ready, key=_load, default=None)
        if chosen is not None:
            self.cluster.drain(chosen)
            self.changes.append((now_s, role.value, -1))

    def _flip(self, now_s: float, per_s: float) -> None:
        assert self._ratio is not None
        workers = {w.name: w for w in self.cluster.workers if w.state in (State.READY, State.RESTING)}
        members = [
            Member(
                name,
                _ROLES[worker.role.name],
                worker.kind.limits.model,
                load=_load(worker),
                idle=not worker.flights,
                kv_tokens=worker.kind.limits.blocks * worker.kind.limits.block_tokens,
                step_budget_tokens=worker.kind.limits.budget_tokens,
            )
            for name, worker in workers.items()
        ]
        self._recent.append(per_s)
        demand = replace(self._demand, requests_per_s=sum(self._recent) / len(self._recent))
        decision = self._ratio.decide(members, demand, now_s)
        worker = workers.get(decision.worker)
        if worker is None:
            return
        if decision.do is Do.DRAIN:
            self.cluster.rest(worker)
        elif decision.do is Do.KEEP_ROLE:
            self.cluster.resume(worker)
        elif decision.do is Do.SET_ROLE:
            assert decision.role is not None
            worker.role = ROLES[decision.role.value]
            self.cluster.resume(worker)
            self.changes.append((now_s, decision.role.value, 0))


def _load(worker: Worker) -> float:
    return worker.engine.sequences + worker.engine.pending_tokens / max(1, worker.kind.limits.budget_tokens)
