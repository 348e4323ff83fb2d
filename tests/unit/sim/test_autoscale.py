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

SLO = SloLimits(ttft_s=4.0, tpot_s=0.3)
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
    traffic = sine(Lengths(5000, 100), 0.2, 4, 600, 1800)
    cluster, controllers, summary = run(fleet((WORKER, PREFILL, 4), (WORKER, DECODE, 4)), traffic, Scaling(SETTINGS))
    assert summary.failed == summary.refused == 0
    assert sum(change < 0 for _, _, change in controllers.changes) >= 3
    assert summary.finished == summary.requests
    assert any(worker.state is State.GONE for worker in cluster.workers)


def test_less_than_the_peak_is_paid_for() -> None:
    traffic = sine(Lengths(5000, 50), 0.2, 8, 900, 2700)
    fixed = Cluster(fleet((WORKER, BOTH, 6)), traffic, PolicyPlacer(fleet((WORKER, BOTH, 6)), ONE_POOL))
    assert fixed.run()
    _, controllers, summary = run(fleet((WORKER, BOTH, 1)), traffic, Scaling(SETTINGS), ONE_POOL)
    assert summary.gpu_hours < 0.8 * summarise(fixed, SLO).gpu_hours
    assert summary.attainment > 0.75
    assert max(count for _, _, count in controllers.counts) >= 4


def test_the_clairvoyant_is_the_yardstick() -> None:
    traffic = sine(Lengths(5000, 50), 0.2, 8, 900, 1800)
    _, _, seen = run(fleet((WORKER, BOTH, 1)), traffic, Scaling(SETTINGS), ONE_POOL)
    _, _, known = run(fleet((WORKER, BOTH, 1)), traffic, Scaling(SETTINGS, clairvoyant=True), ONE_POOL)
    assert known.attainment > seen.attainment
    assert known.attainment > 0.95


def test_silence_goes_to_the_minimum() -> None:
    load = steady(Lengths(5000, 50), 4, 600)
    late = 600 + 900.0
    rows = [(load.arrival_s[i], 5000, 50, ()) for i in range(len(load))]
    traffic = columns([*rows, (late, 10, 1, ())], 1, "load, then silence")
    _, controllers, summary = run(fleet((WORKER, PREFILL, 4), (WORKER, DECODE, 4)), traffic, Scaling(SETTINGS))
    assert summary.finished == summary.requests
    last = {role: count for at_s, role, count in controllers.counts if at_s < late}
    assert last == {"prefill": 1, "decode": 1}


def test_constant_load_comes_to_rest() -> None:
    traffic = steady(Lengths(5000, 50), 2.4, 3600)
    _, controllers, summary = run(fleet((WORKER, BOTH, 2)), traffic, Scaling(SETTINGS), ONE_POOL)
    turns = sum(a[2] != b[2] for a, b in pairwise(controllers.changes))
    assert turns == 0
    assert summary.attainment > 0.95


@pytest.mark.parametrize("works", [lambda number: number > 3, lambda number: number % 2 == 0])
def test_starts_that_fail_do_not_block(works: object) -> None:
    traffic = steady(Lengths(5000, 50), 5, 900)
    scaling = Scaling(SETTINGS, starts=works)  # type: ignore[arg-type]
    cluster, controllers, summary = run(fleet((WORKER, BOTH, 1)), traffic, scaling, ONE_POOL)
    assert sum(worker.state is State.READY for worker in cluster.workers) >= 3
    assert sum(change > 0 for _, _, change in controllers.changes) > 3
    assert summary.finished == summary.requests


def test_controllers_decide_alike_in_both_modes() -> None:
    traffic = sine(Lengths(5000, 50), 0.2, 6, 600, 900)
    found = []
    for slow in (False, True):
        chosen = fleet((WORKER, PREFILL, 2), (WORKER, DECODE, 1))
        cluster = Cluster(chosen, traffic, PolicyPlacer(chosen, STRICT), step_by_step=slow)
        controllers = Autoscaler(cluster, Scaling(SETTINGS, RatioSettings(mode=Mode.ON)), SLO)
        controllers.attach()
        assert cluster.run()
        found.append((controllers.changes, summarise(cluster, SLO)))
    assert found[0] == found[1]


def test_roles_follow_the_load_and_rest() -> None:
    """Long prompts and short answers on a fleet with one reader: workers change sides, once."""
    traffic = steady(Lengths(4000, 20), 4, 1500)
    scaling = Scaling(ratio=RatioSettings(mode=Mode.ON))
    cluster, controllers, summary = run(fleet((WORKER, PREFILL, 1), (WORKER, DECODE, 4)), traffic, scaling)
    assert [role for _, role, change in controllers.changes if change == 0].count("prefill") >= 1
    assert "decode" not in {role for _, role, _ in controllers.changes}
    assert sum(worker.role is PREFILL for worker in cluster.workers) >= 2
    assert summary.finished == summary.requests
    assert max(at_s for at_s, _, _ in controllers.changes) < 900
