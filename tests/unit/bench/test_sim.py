"""The simulator's benchmark, without running it."""

from pathlib import Path

import pytest

from twostroke.bench import sim, sim_setups
from twostroke.errors import ConfigError
from twostroke.sim.traffic_made import Lengths, steady


def test_a_missing_trace_names_flag_and_source(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data .*kvcache-ai/Mooncake"):
        sim.conversation(tmp_path)


def test_cpu_time_is_counted() -> None:
    times: list[float] = []
    with sim.cpu(times):
        sum(range(3_000_000))
    assert 0.01 < times[0] < 5


def test_repeated_traffic_shares_no_prefix_with_its_copies() -> None:
    traffic = steady(Lengths(64, 4), 2, 30)
    traffic.hashes = [(1, 2 + i) for i in range(len(traffic))]
    traffic.unit_tokens = 32
    made = sim._repeated(traffic, 3)
    assert len(made) == 3 * len(traffic)
    assert list(made.arrival_s) == sorted(made.arrival_s)
    heads = [keys[0] for keys in made.hashes]
    assert {heads.count(head) for head in set(heads)} == {len(traffic)}


def test_turns_are_counted() -> None:
    class Controllers:
        changes = ((0.0, "a", 1), (1.0, "b", -1), (2.0, "a", 1), (3.0, "a", -1), (4.0, "a", 1), (5.0, "b", 0))

    assert sim_setups.direction_changes(Controllers()) == 2  # type: ignore[arg-type]


def test_both_policies_run_on_the_benchmark_s_fleet() -> None:
    traffic = steady(Lengths(2000, 20), 2, 20)
    for policy in ("round-robin", "strict"):
        _, found = sim_setups.run(sim_setups.fleet(2, 2, 0, 0), traffic, policy)
        assert found.finished == len(traffic)
        assert found.gpu_hours == pytest.approx(16 * found.duration_s / 3600, rel=0.2)
