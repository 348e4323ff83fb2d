"""The cost, tried on whole clusters: four replicas of Llama-3.1-70B on four H100 each, by a calibrated step model."""

import pytest

from twostroke.measures import SloLimits
from twostroke.policy.plan import ALL_WAYS, ONE_POOL, STRICT, Options
from twostroke.policy.snapshot import Slo
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.cluster import Cluster
from twostroke.sim.fleet import BOTH, DECODE, PREFILL, Fleet, Group, LinkKind, Role, WorkerKind
from twostroke.sim.limits import Limits
from twostroke.sim.placer import PolicyPlacer
from twostroke.sim.summary import summarise
from twostroke.sim.traffic_made import Lengths, steady

H100_TP4 = LinearStepModel(0.0146, 3e-5, 3.1e-8, 6.15e-5, 2.2e-9)
SLO = SloLimits(ttft_s=2.0, itl_s=0.04)
DOCUMENTS, MIXED = Lengths(8192, 256, 0.5), Lengths(4096, 512, 0.8)


def attainment(options: Options, lengths: Lengths, rate: float, *roles: tuple[Role, int]) -> float:
    """Share of requests of 90 seconds of Poisson arrivals that meet the SLO; of two seeds."""
    groups = []
    for role, count in roles:
        limits = Limits(
            H100_TP4,
            blocks=30_000,
            block_tokens=16,
            budget_tokens=8192 if role is PREFILL else 2048,
            sequences=256,
        )
        groups.append(Group(WorkerKind(limits), role, count))
    fleet = Fleet(groups, kv_bytes_per_token=327_680, link=LinkKind(bytes_per_s=100e9))
    shares = []
    for seed in (1, 2):
        placer = PolicyPlacer(fleet, options, slo=Slo(SLO.ttft_s, SLO.itl_s), expected_output_tokens=256)
        cluster = Cluster(fleet, steady(lengths, rate, 90, seed=seed), placer, gap_limit_s=SLO.itl_s)
        assert cluster.run()
        shares.append(summarise(cluster, SLO).attainment)
    return sum(shares) / 2


def test_all_ways_lose_nothing_where_the_ratio_is_right() -> None:
    right = ((PREFILL, 3), (DECODE, 1))
    strict = attainment(STRICT, DOCUMENTS, 3.5, *right)
    assert strict > 0.9
    assert attainment(ALL_WAYS, DOCUMENTS, 3.5, *right) > strict - 0.02


@pytest.mark.parametrize(
    ("lengths", "rate", "prefill", "decode", "strict_at_most", "all_at_least"),
    [(DOCUMENTS, 3.0, 2, 2, 0.85, 0.9), (DOCUMENTS, 4.0, 2, 2, 0.55, 0.7), (MIXED, 4.0, 1, 3, 0.75, 0.9)],
    ids=["a little too few readers", "far too few", "one reader for everybody"],
)
def test_all_ways_make_up_for_a_wrong_ratio(
    lengths: Lengths, rate: float, prefill: int, decode: int, strict_at_most: float, all_at_least: float
) -> None:
    roles = ((PREFILL, prefill), (DECODE, decode))
    assert attainment(STRICT, lengths, rate, *roles) < strict_at_most
    assert attainment(ALL_WAYS, lengths, rate, *roles) > all_at_least
    without = attainment(Options(lent_decoder=False), lengths, rate, *roles)
    assert attainment(ALL_WAYS, lengths, rate, *roles) > without + 0.05, "lent decoders are what does it"


def test_two_strokes_beat_one_pool_of_the_same_workers() -> None:
    one_pool = attainment(ONE_POOL, DOCUMENTS, 3.0, (BOTH, 4))
    assert attainment(ALL_WAYS, DOCUMENTS, 3.0, (BOTH, 4)) > one_pool + 0.2
    assert attainment(ALL_WAYS, DOCUMENTS, 3.0, (PREFILL, 3), (DECODE, 1)) > one_pool + 0.5
