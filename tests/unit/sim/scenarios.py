"""Small fleets and traffic for tests, made up from a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from twostroke.measures import SloLimits
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT
from twostroke.policy.snapshot import Slo
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.cluster import Cluster
from twostroke.sim.fleet import BOTH, DECODE, PREFILL, Failure, Fleet, Group, LinkKind, Role, WorkerKind
from twostroke.sim.limits import Limits
from twostroke.sim.placer import Placer, PolicyPlacer, PrefixPlacer, TurnsPlacer
from twostroke.sim.summary import Summary, summarise
from twostroke.sim.traffic import Asked, Traffic
from twostroke.sim.traffic_files import columns

CHAT_SLO, DOCUMENT_SLO = Slo(0.2, 0.02), Slo(10.0, 1.0)
MODEL = LinearStepModel(
    const_s=0.01,
    per_sequence_s=1e-4,
    per_context_token_s=1e-7,
    per_prefill_token_s=5e-5,
    per_prefill_pair_s=1e-9,
    per_prefill_chunk_s=1e-3,
)
PLAIN = LinearStepModel(
    const_s=0.01, per_sequence_s=0.0, per_context_token_s=0.0, per_prefill_token_s=1e-4, per_prefill_pair_s=0.0
)
"""10 ms a step, 0.1 ms a prompt token."""


def kind(
    model: LinearStepModel = MODEL,
    *,
    blocks: int = 4000,
    block_tokens: int = 16,
    budget_tokens: int = 512,
    sequences: int = 64,
    unit_tokens: int = 0,
    start_s: float = 5.0,
    spare_model: LinearStepModel | None = None,
    busy_model: LinearStepModel | None = None,
) -> WorkerKind:
    limits = Limits(
        model,
        blocks=blocks,
        block_tokens=block_tokens,
        budget_tokens=budget_tokens,
        sequences=sequences,
        unit_tokens=unit_tokens,
        spare_model=spare_model,
        busy_model=busy_model,
    )
    return WorkerKind(limits, dollars_per_hour=2.0, start_s=start_s)


def fleet(*groups: tuple[WorkerKind, Role, int], **more: object) -> Fleet:
    more.setdefault("kv_bytes_per_token", 1e5)
    more.setdefault("link", LinkKind(bytes_per_s=1e9))
    return Fleet([Group(*group) for group in groups if group[2]], **more)  # type: ignore[arg-type]


def traffic(rows: Sequence[tuple[float, int, int]]) -> Traffic:
    return columns([(*row, ()) for row in rows], 1, "test")


def run(
    chosen: Fleet, what: Traffic, placer: Placer | None = None, slo: SloLimits | None = None, *, slow: bool = False
) -> tuple[Cluster, Summary]:
    slo = slo or SloLimits()
    cluster = Cluster(chosen, what, placer or TurnsPlacer(chosen), gap_limit_s=slo.itl_s, step_by_step=slow)
    assert cluster.run()
    return cluster, summarise(cluster, slo)


def random_traffic(source: random.Random, unit_tokens: int) -> Traffic:
    rows: list[tuple[float, int, int, tuple[int, ...]]] = []
    at_s = 0.0
    heads = [tuple(range(1000 * head, 1000 * head + 40)) for head in range(4)]
    for number in range(source.randint(5, 60)):
        # Some at the very same time.
        at_s += source.choice([0.0, 0.01, source.expovariate(5), source.expovariate(1)])
        prompt = int(min(source.lognormvariate(5.5, 1.2), 1500)) + 1
        output = source.choice([1, 2, source.randint(1, 40), source.randint(1, 300)])
        shared = source.randint(0, prompt // unit_tokens) if unit_tokens else 0
        own = range(10**6 + 1000 * number, 10**6 + 1000 * number + 200)
        rows.append((at_s, prompt, output, (*source.choice(heads)[:shared], *own)))
    made = columns(rows, unit_tokens or 1, "random")
    if not unit_tokens:
        made.hashes = ()
    if source.random() < 0.2:
        made.concurrency = source.randint(1, 8)
    if source.random() < 0.4:
        made.asked = [Asked(source.choice([CHAT_SLO, DOCUMENT_SLO]), source.choice([1, 128])) for _ in rows]
    return made


def random_fleet(source: random.Random, unit_tokens: int) -> Fleet:
    one = kind(
        LinearStepModel(*(source.uniform(0.2, 2) * each for each in (0.01, 1e-4, 1e-7, 5e-5, 1e-9, 1e-3)))
        if source.random() < 0.7
        else PLAIN,
        blocks=source.choice([130, 200, 400, 4000]),
        block_tokens=source.choice([8, 16, 16]) if not unit_tokens else 16,
        budget_tokens=source.choice([32, 128, 512, 2048]),
        sequences=source.choice([2, 8, 64]),
        unit_tokens=unit_tokens,
        start_s=source.uniform(0.1, 2),
        spare_model=PLAIN if source.random() < 0.2 else None,
        busy_model=MODEL if source.random() < 0.2 else None,
    )
    shape = source.choice([(0, 0, 1), (0, 0, 3), (1, 1, 0), (2, 1, 0), (1, 2, 0), (2, 2, 0), (1, 1, 1)])
    roles = zip((PREFILL, DECODE, BOTH), shape, strict=True)
    failures = []
    if source.random() < 0.4:
        failures = [
            Failure(source.uniform(0, 10), source.randrange(sum(shape)), source.uniform(0, 3))
            for _ in range(source.randint(1, 3))
        ]
    return fleet(
        *((one, role, count) for role, count in roles),
        link=LinkKind(
            bytes_per_s=source.choice([1e8, 1e9, 1e11]),
            start_s=source.choice([0.0, 0.001]),
            descriptor_s=source.choice([0.0, 1e-5]),
            workers_per_port=source.choice([1, 2]),
        ),
        overlap=source.random() < 0.7,
        hop_s=source.choice([0.0, 0.001, 0.01]),
        decode_first_token=source.random() < 0.2,
        handoff_timeout_s=source.choice([1.0, 30.0]),
        failures=failures,
    )


def random_placer(source: random.Random, chosen: Fleet) -> Placer:
    """The same one again for the same state of the source."""
    which = source.randrange(5)
    if which == 0:
        return TurnsPlacer(chosen)
    if which == 1:
        return PrefixPlacer(chosen)
    return PolicyPlacer(chosen, (ALL_WAYS, ONE_POOL, STRICT)[which - 2])
