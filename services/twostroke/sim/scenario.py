"""A simulation as it is asked for on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.measures import SloLimits
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT, Options
from twostroke.policy.snapshot import Slo
from twostroke.sim import traffic_files
from twostroke.sim.fleet import BOTH, DECODE, PREFILL, Failure, Fleet, Group, LinkKind
from twostroke.sim.perf.transfer import TransferModel
from twostroke.sim.placer import Placer, PolicyPlacer, PrefixPlacer, TurnsPlacer
from twostroke.sim.replica import Replica, ReplicaSpec, replica
from twostroke.sim.traffic import Traffic
from twostroke.sim.traffic_made import Lengths, closed_loop, parse_lengths, rescaled, sine, steady

POLICIES: dict[str, Options | None] = {
    "all": ALL_WAYS,
    "strict": STRICT,
    "one-pool": ONE_POOL,
    "round-robin": None,
    "prefix-only": None,
}


@dataclass(frozen=True, slots=True)
class TrafficSpec:
    """Where the requests come from. trace: a file; else lengths, with a rate or a concurrency.

    scale: of a trace's rate. requests: most of them, 0 for all, and how many a closed loop sends.
    """

    trace: Path | None = None
    lengths: str = ""
    rate: str = ""
    cv: float = 1.0
    seconds: float = 600.0
    concurrency: int = 0
    requests: int = 0
    scale: float = 1.0
    seed: int = 1

    def make(self) -> Traffic:
        """Raises ConfigError: what is missing, or what is wrong with it."""
        if self.trace is not None:
            traffic = traffic_files.read(self.trace, seed=self.seed)
            if self.concurrency:
                traffic.concurrency = self.concurrency
            if self.rate:
                if not traffic.span_s:
                    traffic = _paced(traffic, _rates(self.rate)[0], self.cv, self.seed)
                else:
                    return rescaled(traffic, _rates(self.rate)[0] * traffic.span_s / len(traffic), self.requests)
            elif not traffic.span_s and not self.concurrency and len(traffic) > 1:
                raise ConfigError(f"{self.trace} has lengths only; add --rate or --concurrency")
            return rescaled(traffic, self.scale, self.requests)
        if not self.lengths:
            raise ConfigError("no traffic: give --trace FILE, or --lengths PROMPT/ANSWER with --rate or --concurrency")
        lengths = parse_lengths(self.lengths)
        if self.concurrency:
            return closed_loop(lengths, self.concurrency, self.requests or 20 * self.concurrency, seed=self.seed)
        if not self.rate:
            raise ConfigError("--lengths needs --rate REQUESTS_PER_S (or LOW-HIGH/PERIOD_S) or --concurrency N")
        low, high, period_s = _rates(self.rate)
        if high > low:
            made = sine(lengths, low, high, period_s, self.seconds, seed=self.seed)
        else:
            made = steady(lengths, low, self.seconds, cv=self.cv, seed=self.seed)
        if not len(made):
            raise ConfigError(f"--rate {self.rate} for {self.seconds:g} s makes no request; raise one of them")
        return rescaled(made, 1.0, self.requests)


def _rates(text: str) -> tuple[float, float, float]:
    """(low, high, period_s) of "3" or "1-24/600"."""
    found = re.fullmatch(r"([\d.]+)(?:-([\d.]+)/([\d.]+))?", text)
    if not found or not float(found[1]) > 0:
        raise ConfigError(f"--rate {text}: write requests per second, such as 3, or LOW-HIGH/PERIOD_S such as 1-24/600")
    low = float(found[1])
    return low, float(found[2] or low), float(found[3] or 0)


def _paced(traffic: Traffic, rate: float, cv: float, seed: int) -> Traffic:
    """Gives lengths their times."""
    times = steady(Lengths(1, 1), rate, 2 * len(traffic) / rate + 3600, cv=cv, seed=seed, most=len(traffic))
    return replace(traffic, arrival_s=times.arrival_s)


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """How many replicas of what. prefill_spec, decode_spec: where they differ from `spec`.

    link_gbps: of one worker's port in Gbit/s; 0 takes the hardware sheet's network. hop_s: from one process to another;
    None takes what a profile has measured, or a millisecond.
    """

    spec: ReplicaSpec
    prefill: int = 0
    decode: int = 0
    both: int = 0
    prefill_spec: ReplicaSpec | None = None
    decode_spec: ReplicaSpec | None = None
    link_gbps: float = 0.0
    link: LinkKind = field(default_factory=LinkKind)
    overlap: bool = True
    decode_first_token: bool = False
    hop_s: float | None = None
    cell_workers: int = 0
    failures: tuple[Failure, ...] = ()

    def make(self, traffic: Traffic) -> Fleet:
        """Raises ConfigError."""
        if self.prefill + self.decode + self.both == 0 or bool(self.prefill) != bool(self.decode):
            raise ConfigError("give --both N, or --prefill N with --decode N, or all three")
        groups = []
        sender: Replica | None = None
        for role, count, own in (
            (PREFILL, self.prefill, self.prefill_spec),
            (DECODE, self.decode, self.decode_spec),
            (BOTH, self.both, None),
        ):
            if count:
                made = replica(replace(own or self.spec, unit_tokens=traffic.unit_tokens))
                sender = sender or made
                groups.append(Group(made.kind, role, count))
        assert sender is not None
        # What an engine reaches of a stated rate.
        bytes_per_s = (self.link_gbps * 1e9 / 8 or sender.network_bytes_per_s) * TransferModel().efficiency
        return Fleet(
            groups,
            link=replace(self.link, bytes_per_s=bytes_per_s),
            kv_bytes_per_token=sender.kv_bytes_per_token,
            overlap=self.overlap,
            decode_first_token=self.decode_first_token,
            hop_s=sender.hop_s if self.hop_s is None else self.hop_s,
            cell_workers=self.cell_workers,
            failures=self.failures,
        )


def make_placer(policy: str, fleet: Fleet, traffic: Traffic, slo: SloLimits, deadline_s: float | None = None) -> Placer:
    """The router's policy under one of its settings, or a rule to compare it with. Raises ConfigError."""
    if policy not in POLICIES:
        raise ConfigError(f"no policy {policy}; known are {', '.join(POLICIES)}")
    options = POLICIES[policy]
    if options is None:
        return TurnsPlacer(fleet) if policy == "round-robin" else PrefixPlacer(fleet)
    if deadline_s is not None:
        options = replace(options, refuse=True)
    expected = round(sum(traffic.output_tokens) / max(1, len(traffic)))
    wanted = Slo(slo.ttft_s or Slo().ttft_s, slo.itl_s or slo.tpot_s or Slo().itl_s)
    return PolicyPlacer(fleet, options, slo=wanted, expected_output_tokens=max(1, expected), deadline_s=deadline_s)


def parse_failure(text: str) -> Failure:
    """From "WORKER@SECONDS" or "WORKER@SECONDS+DOWN_S". Raises ConfigError."""
    found = re.fullmatch(r"(\d+)@([\d.]+)(?:\+([\d.]+))?", text)
    if not found:
        raise ConfigError(f"--fail {text}: write WORKER@SECONDS or WORKER@SECONDS+DOWN_S, such as 2@60+30")
    return Failure(float(found[2]), int(found[1]), float(found[3]) if found[3] else -1.0)
