"""Controllers at work on a simulated fleet."""

from __future__ import annotations

from itertools import pairwise

import pytest

from twostroke.measures import SloLimits
from twostroke.policy.plan import ONE_POOL, STRICT, Options
from twostroke.policy.ratio import Mode, RatioSettings
from twostroke.policy.replicas import ReplicaSettings
from twostroke.sim.autoscale import Autoscaler, Scaling
from twostroke.sim.cluster import Cluster
from twostroke.sim.fleet import BOTH, DECODE, PREFILL, Fleet
from twostroke.sim.placer import PolicyPlacer
from twostroke.sim.summary import Summary, summarise
from twostroke.sim.traffic import Traffic
from twostroke.sim.traffic_files import columns
from twostroke.sim.traffic_made import Lengths, sine, steady
from twostroke.sim.worker import State
from unit.sim.scenarios import PLAIN, fleet, kind

SLO = SloLimits(ttft_s=2.0, tpot_s=0.1)
START_S = 30.0
SETTINGS = ReplicaSettings(start_s=START_S)
WORKER = kind(PLAIN, budget_tokens=2048, blocks=20_000, start_s=START_S)


def run(
    chosen: Fleet, traffic: Traffic, scaling: Scaling, options: Options = STRICT
) -> tuple[Cluster, Autoscaler, Summary]:
    cluster = Cluster(chosen, traffic, PolicyPlacer(chosen, options))
    controllers = Autoscaler(cluster, scaling, SLO)
    controllers.attach()
    assert cluster.run()
    return cluster, controllers, summarise(cluster, SLO)


def test_scale_in_drops_nobody() -> None:
    traffic = sine(Lengths(1000, 200), 1, 20, 600, 1800)
    cluster, controllers, summary = run(fleet((WORKER, PREFILL, 4), (WORKER, DECODE, 4)), traffic, Scaling(SETTINGS))
    assert sum(change < 0 for _, _, change in controllers.changes) >= 3
    assert summary.finished == summary.requests
    # Nobody was placed twice: a drained worker finished what it had.
    assert max(cluster.records.attempts) == 1
    assert any(worker.state is State.GONE for worker in cluster.workers)


def test_less_than_the_peak_is_paid_for() -> None:
    traffic = sine(Lengths(1000, 100), 1, 40, 900, 3600)
    fixed = Cluster(fleet((WORKER, BOTH, 6)), traffic, PolicyPlacer(fleet((WORKER, BOTH, 6)), ONE_POOL))
    assert fixed.run()
    _, controllers, summary = run(fleet((WORKER, BOTH, 1)), traffic, Scaling(SETTINGS), ONE_POOL)
    assert summary.gpu_hours < 0.8 * summarise(fixed, SLO).gpu_hours
    assert summary.attainment > 0.75
    assert max(count for _, _, count in controllers.counts) >= 4


def test_the_clairvoyant_is_the_yardstick() -> None:
    traffic = sine(Lengths(1000, 100), 1, 40, 900, 1800)
    _, _, seen = run(fleet((WORKER, BOTH, 1)), traffic, Scaling(SETTINGS), ONE_POOL)
    _, _, known = run(fleet((WORKER, BOTH, 1)), traffic, Scaling(SETTINGS, clairvoyant=True), ONE_POOL)
    assert known.attainment > seen.attainment
    assert known.attainment > 0.95


def test_silence_goes_to_the_minimum() -> None:
    load = steady(Lengths(1000, 100), 20, 600)
    late = 600 + 900.0
    rows = [(load.arrival_s[i], 1000, 100, ()) for i in range(len(load))]
    traffic = columns([*rows, (late, 10, 1, ())], 1, "load, then silence")
    _, controllers, summary = run(fleet((WORKER, PREFILL, 4), (WORKER, DECODE, 4)), traffic, Scaling(SETTINGS))
    assert summary.finished == summary.requests
    last = {role: count for at_s, role, count in controllers.counts if at_s < late}
    assert last == {"prefill": 1, "decode": 1}


def test_constant_load_comes_to_rest() -> None:
    traffic = steady(Lengths(1000, 100), 12, 3600)
    _, controllers, summary = run(fleet((WORKER, BOTH, 2)), traffic, Scaling(SETTINGS), ONE_POOL)
    turns = sum(a[2] != b[2] for a, b in pairwise(controllers.changes))
    assert turns == 0
    assert summary.attainment > 0.95


@pytest.mark.parametrize("works", [lambda number: number > 3, lambda number: number % 2 == 0])
def test_starts_that_fail_do_not_block(works: object) -> None:
    traffic = steady(Lengths(1000, 100), 25, 900)
    scaling = Scaling(SETTINGS, starts=works)  # type: ignore[arg-type]
    cluster, controllers, summary = run(fleet((WORKER, BOTH, 1)), traffic, scaling, ONE_POOL)
    assert sum(worker.state is State.READY for worker in cluster.workers) >= 3
    assert sum(change > 0 for _, _, change in controllers.changes) > 3
    assert summary.finished == summary.requests


def test_roles_follow_the_load_and_rest() -> None:
    """Long prompts and short answers on a fleet with one reader: workers change sides, once."""
    traffic = steady(Lengths(4000, 20), 5, 1800)
    scaling = Scaling(ratio=RatioSettings(mode=Mode.ON))
    cluster, controllers, summary = run(fleet((WORKER, PREFILL, 1), (WORKER, DECODE, 4)), traffic, scaling)
    assert [role for _, role, change in controllers.changes if change == 0].count("prefill") >= 2
    assert "decode" not in {role for _, role, _ in controllers.changes}
    assert sum(worker.role is PREFILL for worker in cluster.workers) >= 3
    assert summary.finished == summary.requests
    assert max(at_s for at_s, _, _ in controllers.changes) < 900
