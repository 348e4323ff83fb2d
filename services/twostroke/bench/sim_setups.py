"""The fleets and loads that bench/sim.py simulates."""

from __future__ import annotations

from dataclasses import replace

from twostroke.measures import SloLimits
from twostroke.policy.ratio import Mode, RatioSettings
from twostroke.policy.replicas import ReplicaSettings
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.autoscale import Autoscaler, Scaling
from twostroke.sim.cluster import Cluster
from twostroke.sim.fleet import BOTH, DECODE, PREFILL, Fleet, Group, LinkKind, WorkerKind
from twostroke.sim.limits import Limits
from twostroke.sim.placer import Placer
from twostroke.sim.replica import ReplicaSpec
from twostroke.sim.scenario import FleetSpec, make_placer
from twostroke.sim.summary import Summary, summarise
from twostroke.sim.traffic import Traffic
from twostroke.sim.traffic_made import Lengths, sine, steady

LLAMA_70B = LinearStepModel(
    const_s=0.0146,
    per_sequence_s=3e-5,
    per_context_token_s=3.1e-8,
    per_prefill_token_s=6.15e-5,
    per_prefill_pair_s=2.2e-9,
    per_prefill_chunk_s=4e-3,
)
"""Llama-3.1-70B, BF16, four H100: fitted to public step times."""
SLO = SloLimits(ttft_s=10.0, tpot_s=0.05)
SWING_SLO = SloLimits(ttft_s=3.0, tpot_s=0.035)
SWING_START_S = 180.0
DAY_S = 86_400.0


def fleet(prefill: int, decode: int, both: int, unit_tokens: int, cell_workers: int = 0) -> Fleet:
    """Replicas of LLAMA_70B on links of 4 x 400 Gbit/s."""
    limits = Limits(
        LLAMA_70B, blocks=60_000, block_tokens=16, budget_tokens=8192, sequences=256, unit_tokens=unit_tokens
    )
    kind = WorkerKind(limits, gpus=4, dollars_per_hour=10.0, start_s=SWING_START_S)
    counts = ((PREFILL, prefill), (DECODE, decode), (BOTH, both))
    return Fleet(
        [Group(kind, role, count) for role, count in counts if count],
        link=LinkKind(bytes_per_s=164e9),
        kv_bytes_per_token=327_680,
        cell_workers=cell_workers,
    )


def run(
    chosen: Fleet, traffic: Traffic, policy: str | Placer, slo: SloLimits = SLO, *, step_by_step: bool = False
) -> tuple[Cluster, Summary]:
    """One simulation. policy: a name of scenario.POLICIES, or a placer."""
    placer = make_placer(policy, chosen, traffic, slo) if isinstance(policy, str) else policy
    cluster = Cluster(chosen, traffic, placer, gap_limit_s=slo.itl_s, step_by_step=step_by_step)
    if not cluster.run():
        raise KeyboardInterrupt
    return cluster, summarise(cluster, slo)


def scaled(
    chosen: Fleet, traffic: Traffic, scaling: Scaling, slo: SloLimits, policy: str = "strict"
) -> tuple[Autoscaler, Summary]:
    """One simulation with controllers at work."""
    cluster = Cluster(chosen, traffic, make_placer(policy, chosen, traffic, slo), gap_limit_s=slo.itl_s)
    controllers = Autoscaler(cluster, scaling, slo)
    controllers.attach()
    if not cluster.run():
        raise KeyboardInterrupt
    return controllers, summarise(cluster, slo)


def swing(hours: float, *, clairvoyant: bool) -> tuple[Autoscaler, Summary]:
    """1 to 24 requests/s and back every 900 s, 8000/1000 tokens, Qwen3-30B-A3B on pairs of H100, from one worker of
    each role on (the load of ai-dynamo/dynamo#10528)."""
    traffic = sine(Lengths(8000, 1000), 1, 24, 900, hours * 3600)
    spec = ReplicaSpec("qwen3-30b-a3b", gpu="h100", tp=2, start_s=SWING_START_S)
    chosen = FleetSpec(spec, prefill=1, decode=1).make(traffic)
    scaling = Scaling(ReplicaSettings(start_s=SWING_START_S), clairvoyant=clairvoyant)
    return scaled(chosen, traffic, scaling, SWING_SLO)


def constant_day(what: str) -> tuple[Autoscaler, Summary]:
    """24 hours of a constant load on a fleet with controllers. what: "replicas" or "roles"."""
    lengths = Lengths(4000, 200, 0.8)
    traffic = steady(lengths, 2.5, DAY_S)
    if what == "replicas":
        scaling = Scaling(ReplicaSettings(start_s=SWING_START_S))
        return scaled(fleet(1, 1, 0, 0), traffic, scaling, SloLimits(ttft_s=2.0, tpot_s=0.03))
    scaling = Scaling(ratio=RatioSettings(mode=Mode.ON))
    return scaled(fleet(1, 4, 0, 0), traffic, scaling, SloLimits(ttft_s=2.0, tpot_s=0.03))


def direction_changes(controllers: Autoscaler) -> int:
    """Reversals: a start after a drain of the same role or the other way round, and every flip after the first two."""
    reversals = 0
    last: dict[str, int] = {}
    flips = 0
    for _, role, change in controllers.changes:
        if change == 0:
            flips += 1
            continue
        reversals += last.get(role, change) != change
        last[role] = change
    return reversals + max(0, flips - 2)


def short(traffic: Traffic, requests: int) -> Traffic:
    """The first so many of them."""
    return replace(
        traffic,
        arrival_s=traffic.arrival_s[:requests],
        prompt_tokens=traffic.prompt_tokens[:requests],
        output_tokens=traffic.output_tokens[:requests],
        hashes=traffic.hashes[:requests],
    )
