"""Validation against bench-serve, without a server."""

import json
from pathlib import Path

import pytest

from twostroke.bench import sim_profiles, sim_serve
from twostroke.bench.record import Record, Value
from twostroke.bench.serve import systems, traffic
from twostroke.bench.serve.traffic import CHAT, DOCUMENT, Arrival
from twostroke.errors import ConfigError
from twostroke.measures import SloLimits
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.replica import Profile, ReplicaSpec

STEP_S, TOKEN_S = 0.05, 0.001


@pytest.fixture
def profiles(tmp_path: Path) -> dict[str, ReplicaSpec]:
    found = {}
    for name, factor in (
        (sim_profiles.ONE_CORE, 1.0),
        (sim_profiles.BUSY, 1.25),
        (sim_profiles.SPARE, 0.5),
        (sim_profiles.ALL_CORES, 0.5),
    ):
        model = LinearStepModel(STEP_S * factor, 0.0, 0.0, TOKEN_S * factor)
        made = Profile("m", "e", model, 4000, 16, 512, 64, 46_080.0, 9, 0.001, 0.01)
        made.save(tmp_path / f"{name}.json")
        found[name] = ReplicaSpec(str(tmp_path / f"{name}.json"))
    return found


def test_a_lone_chat_is_predicted_exactly(profiles: dict[str, ReplicaSpec]) -> None:
    chat = [Arrival(1.0, CHAT, 100, 20)]
    found = sim_serve.predicted(
        sim_serve.setup(systems.ONE, profiles, SloLimits()), chat, {CHAT: SloLimits(itl_s=0.25)}
    )
    half_step_s = STEP_S / 2
    assert found[CHAT]["ttft_p50_s"] == pytest.approx(half_step_s + 100 * TOKEN_S / 2 + 0.001, rel=0.01)
    assert found[CHAT]["itl_p50_ms"] == pytest.approx(half_step_s * 1e3, rel=0.01)
    assert set(found) == {CHAT}


def test_a_document_alone_has_all_cores(profiles: dict[str, ReplicaSpec]) -> None:
    document = [Arrival(0.0, DOCUMENT, 4000, 1)]
    pair, whole = (
        sim_serve.predicted(sim_serve.setup(label, profiles, SloLimits()), document, {})
        for label in (systems.STRICT, "chunk-512")
    )
    assert pair[DOCUMENT]["ttft_p50_s"] == pytest.approx(whole[DOCUMENT]["ttft_p50_s"], rel=0.05)


def test_every_system_runs_on_its_own_cores(profiles: dict[str, ReplicaSpec]) -> None:
    arrivals = [Arrival(0.1 * index, CHAT, 20, 500) for index in range(8)] + [Arrival(1.0, DOCUMENT, 4000, 4)]
    pair, whole = (
        sim_serve.predicted(sim_serve.setup(label, profiles, SloLimits()), arrivals, {CHAT: SloLimits(itl_s=0.25)})
        for label in (systems.STRICT, "chunk-512")
    )
    assert pair[CHAT]["itl_p50_ms"] == pytest.approx(STEP_S * 1e3, rel=0.01)
    assert whole[CHAT]["itl_p50_ms"] == pytest.approx(STEP_S / 2 * 1e3, rel=0.01)
    assert 5 < pair[DOCUMENT]["ttft_p50_s"] < 6, "decode is busy, and memory with it"
    assert 2 < whole[DOCUMENT]["ttft_p50_s"] < 3
    assert "itl_p50_ms" not in pair[DOCUMENT]


@pytest.mark.parametrize(
    "label", [systems.ONE, "chunk-128", systems.ROUND_ROBIN, systems.VLLM_ROUTER, systems.STRICT, systems.ALL]
)
def test_every_system_of_bench_serve_is_known(label: str, profiles: dict[str, ReplicaSpec]) -> None:
    chosen = sim_serve.setup(label, profiles, SloLimits())
    found = sim_serve.predicted(chosen, traffic.read(traffic.COMMITTED)["mixed"], {CHAT: SloLimits(itl_s=0.25)})
    assert set(found) == {CHAT, DOCUMENT}
    assert min(each["ttft_p50_s"] for each in found.values()) > 0


def test_an_unknown_system_is_named(profiles: dict[str, ReplicaSpec]) -> None:
    with pytest.raises(ConfigError, match="has measured elsewhere"):
        sim_serve.setup("elsewhere", profiles, SloLimits())


def test_medians_are_compared_and_the_worst_is_checked(profiles: dict[str, ReplicaSpec]) -> None:
    mixes = {"chat": [Arrival(1.0, CHAT, 100, 20)]}
    right = sim_serve.predicted(sim_serve.setup("one", profiles, SloLimits()), mixes["chat"], {})[CHAT]
    common: dict[str, Value] = {"mix": "chat", "system": "one", "rounds": 2}
    rows: list[dict[str, Value]] = [
        {**common, "of": "all", "slo": None, "tokens_per_s": 1.0},
        {**common, "of": CHAT, "slo": "itl=250ms", "ttft_p50_s": right["ttft_p50_s"] / 1.1, "itl_p50_ms": 50.0},
    ]
    record = Record("sim_serve", "x")
    sim_serve.report(record, list(sim_serve.comparisons(rows, mixes, profiles)))
    assert [row["error"] for row in record.rows] == [pytest.approx(0.1), pytest.approx(0.5, rel=0.01)]
    (check,) = record.checks
    assert "itl_p50_ms of chat in chat" in check.name
    assert check.value == pytest.approx(50, rel=0.02)
    assert not check.ok


def test_nothing_to_compare_is_not_ok() -> None:
    record = Record("sim_serve", "x")
    sim_serve.report(record, [])
    assert not record.ok


def test_records_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="run `make bench-serve` first"):
        sim_serve.measured(tmp_path / "serve.json")
    path = tmp_path / "quick.json"
    path.write_text(json.dumps({"command": "python -m twostroke.bench.serve --quick", "rows": []}))
    with pytest.raises(ConfigError, match="other arrivals"):
        sim_serve.measured(path)
