"""Taking many steps at once ends at bit for bit the same numbers as taking each alone."""

import random

import pytest

from twostroke.measures import SloLimits
from twostroke.sim.cluster import Cluster
from unit.sim.scenarios import random_fleet, random_placer, random_traffic, run


def outcome(seed: int, slow: bool) -> tuple[object, Cluster]:
    source = random.Random(seed)
    unit_tokens = source.choice([0, 32])
    chosen = random_fleet(source, unit_tokens)
    what = random_traffic(source, unit_tokens)
    placer = random_placer(source, chosen)
    cluster, summary = run(chosen, what, placer, SloLimits(ttft_s=1.0, itl_s=0.02), slow=slow)
    records = cluster.records
    sizes, counts = records.gaps.bins()
    columns = [list(column) for column in records.marks()]
    rest = [list(records.first_s), list(records.over), sizes.tolist(), counts.tolist(), summary.plain()]
    return [*columns, *rest], cluster


@pytest.mark.parametrize("block", range(20))
def test_many_steps_at_once_equal_single_steps(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        fast, cluster = outcome(seed, slow=False)
        slow, _ = outcome(seed, slow=True)
        assert fast == slow, f"seed {seed}"
        for worker in cluster.workers:
            assert worker.flights == 0, f"seed {seed}"
            if worker.gone_s < 0:
                assert worker.engine.idle, f"seed {seed}"
                assert worker.expected == worker.promised == worker.expected_context == 0, f"seed {seed}"
        records = cluster.records
        assert records.finished + records.failed + records.refused == len(cluster.traffic), f"seed {seed}"
        for request in range(len(cluster.traffic)):
            if records.end_s[request] >= 0:
                parts = records.parts_s(request)
                assert min(parts.values()) >= 0, f"seed {seed}: {parts}"
                assert sum(parts.values()) == pytest.approx(records.end_s[request] - records.arrival_s[request])
