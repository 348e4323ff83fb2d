"""The planner, on profiles so small that every answer can be checked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from twostroke.errors import ConfigError
from twostroke.measures import SloLimits, parse_slo
from twostroke.policy.step_model import LinearStepModel, StepBatch
from twostroke.sim.planner import values
from twostroke.sim.planner.command import PlanFlags, plan
from twostroke.sim.planner.errors import Interval, Scaled
from twostroke.sim.planner.screen import Load, Screener, best, prefill_s
from twostroke.sim.planner.search import Lab, Question, Trial, search, try_out
from twostroke.sim.planner.space import Config, Space, kind, parse_inventory
from twostroke.sim.planner.verdict import judge
from twostroke.sim.replica import Profile, ReplicaSpec
from twostroke.sim.scenario import FleetSpec, TrafficSpec

MODEL = LinearStepModel(
    const_s=0.01, per_sequence_s=1e-4, per_context_token_s=2e-8, per_prefill_token_s=1e-4, per_prefill_pair_s=1e-9
)
EXACT = Interval(1.0, 1.0)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "worker.json"
    Profile("tiny", "test", MODEL, 20_000, 16, 4096, 256, 1e5, 10, 1e-4, 0.01, link_bytes_per_s=5e9).save(path)
    return str(path)


def space(model: str, gpus: str, **more: object) -> Space:
    return Space(ReplicaSpec(model, dollars_per_hour=1.0), parse_inventory(gpus, "any"), tps=(1,), **more)  # type: ignore[arg-type]


def question(model: str, lengths: str, rate: str, slo: str, target: float = 0.95) -> Question:
    traffic = TrafficSpec(lengths=lengths, rate=rate, seconds=120).make()
    return Question(traffic, parse_slo(slo), FleetSpec(ReplicaSpec(model)), target)


def test_inventory() -> None:
    assert parse_inventory("8xh100, 4xl40s", "a100").gpus == (("h100", 8), ("l40s", 4))
    assert parse_inventory("16", "a100").gpus == (("a100", 16),)
    for bad in ("many", "0", "8x"):
        with pytest.raises(ConfigError, match="--gpus"):
            parse_inventory(bad, "a100")


def test_the_space_holds_every_split(model: str) -> None:
    small = space(model, "3", budgets=(512,), sequences=(64,))
    shapes = {(each.prefill, each.decode, each.both) for each in small.configs()}
    assert shapes == {(0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 1, 0), (1, 2, 0), (2, 1, 0)}
    assert {each.gpus for each in space(model, "3", smaller=False).configs()} == {3}


def test_a_prompt_alone_takes_what_the_engine_takes(model: str) -> None:
    own = kind(ReplicaSpec(model, budget_tokens=512))
    assert own is not None
    assert prefill_s(own.kind, 1024) == pytest.approx(2 * 0.01 + 1024 * 1e-4 + 1024**2 / 2 * 1e-9)


def test_formulas_and_simulation_agree_on_what_is_hopeless_and_what_is_easy(model: str) -> None:
    asked = question(model, "2000/100", "3", "ttft=1s,tpot=30ms")
    screener = Screener(Load.of(asked.traffic), asked.slo)
    for config in space(model, "6", budgets=(512, 4096), sequences=(64,)).configs():
        screened = screener.screen(config)
        found = try_out(asked, Trial(config, asked.slo))
        if screened.attainment > 0.98:
            assert found.attainment > 0.8, config.text()
        if screened.attainment < 0.05:
            assert found.attainment < 0.6, config.text()


def test_best_keeps_both_shapes_and_variety(model: str) -> None:
    asked = question(model, "2000/100", "3", "ttft=1s,tpot=30ms")
    screener = Screener(Load.of(asked.traffic), asked.slo)
    chosen = best([screener.screen(each) for each in space(model, "8").configs()], 0.95, 20, 5)
    assert len(chosen) == 20
    assert sum(each.config.two_pools for each in chosen) >= 5
    assert sum(not each.config.two_pools for each in chosen) >= 5
    layouts = [(each.config.prefill, each.config.decode, each.config.both) for each in chosen]
    assert max(layouts.count(each) for each in layouts) <= 2


def test_tight_gaps_want_two_pools(model: str) -> None:
    """Long prompts beside answers that may not stall: no chunk is small enough."""
    asked = question(model, "4000/100", "2.5", "ttft=3s,itl=14ms")
    lab = Lab(asked, processes=1)
    with lab.open():
        found = search(lab, space(model, "4", sequences=(64,)), 16, lambda text: None, 400)
        verdict = judge(lab, found, EXACT, EXACT, most=200, with_flips=False)
    assert verdict.answer == "two pools"
    assert verdict.meets
    assert verdict.chosen.config.two_pools
    assert verdict.one is not None
    assert verdict.one.found.attainment < 0.8


def test_loose_gaps_want_one_pool(model: str) -> None:
    asked = question(model, "200/200", "3", "ttft=2s,tpot=60ms")
    lab = Lab(asked, processes=1)
    with lab.open():
        found = search(lab, space(model, "3", sequences=(64,)), 16, lambda text: None, 300)
        verdict = judge(lab, found, EXACT, EXACT, most=200)
    assert verdict.answer == "one pool"
    assert not verdict.chosen.config.two_pools
    assert verdict.chosen.config.gpus == 1, "the cheapest that does"
    assert verdict.two is not None
    assert any(flip.what == "ITL limit" for flip in verdict.flips) is False
    assert {flip.what for flip in verdict.flips} >= {"arrival rate", "prompt length", "KV link", "TTFT limit"}


def test_wide_errors_leave_it_undecided(model: str) -> None:
    asked = question(model, "4000/100", "2.5", "ttft=3s,tpot=25ms")
    lab = Lab(asked, processes=1)
    with lab.open():
        found = search(lab, space(model, "4", sequences=(64,)), 12, lambda text: None, 300)
        sure = judge(lab, found, EXACT, EXACT, most=150, with_flips=False)
        unsure = judge(lab, found, Interval(0.4, 2.5), Interval(0.4, 2.5), most=150, with_flips=False)
    assert sure.ratio_low == sure.ratio_high
    assert unsure.ratio_low < unsure.ratio_high
    assert unsure.answer == "undecided" or unsure.ratio_low > 1.05 or unsure.ratio_high < 1.05


def test_scaled_step_times() -> None:
    slow = Scaled(MODEL, prefill=2.0, decode=3.0)
    assert slow.decode_terms(4)[0] == pytest.approx(3 * MODEL.decode_terms(4)[0])
    alone = StepBatch(0, 0, 100, 5000.0, 1)
    assert slow.step_s(alone) == pytest.approx(2 * MODEL.step_s(alone))
    mixed = StepBatch(4, 400, 100, 5000.0, 1)
    decode_s = MODEL.step_s(StepBatch(4, 400, 0, 0.0))
    assert slow.step_s(mixed) == pytest.approx(3 * decode_s + 2 * (MODEL.step_s(mixed) - decode_s))


def test_the_command_writes_what_it_says(model: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    flags = PlanFlags(
        space(model, "2", budgets=(512,), sequences=(64,)),
        TrafficSpec(lengths="500/50", rate="2", seconds=30),
        SloLimits(ttft_s=1.0, tpot_s=0.05),
        FleetSpec(ReplicaSpec(model)),
        0.95, Interval(0.9, 1.1), Interval(0.9, 1.1), 4, 60, True, folder, tmp_path / "plan.json", "twostroke plan <&>",
    )  # fmt: skip
    console = Console(record=True, width=200)
    assert plan(flags, console) == 0
    text = console.export_text()
    assert "Do not disaggregate." in text
    assert "What would turn it round" in text
    found = json.loads((tmp_path / "plan.json").read_text())
    assert found["answer"] == "one pool"
    assert found["screened"] == 3
    page = (folder / "plan.html").read_text()
    assert "<svg" in page
    assert "http" not in page.replace("http-equiv", "")
    assert "&lt;&amp;&gt;" in page
    assert "  worker:\n    deploy: { replicas: 1 }" in (folder / "compose.plan.yaml").read_text()
    assert "  worker:\n    role: both\n    replicas: 1" in (folder / "kubernetes-values.yaml").read_text()


def test_ctrl_c_shows_what_there_is(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = 0

    def interrupted(asked: Question, trial: Trial) -> object:
        nonlocal tried
        tried += 1
        if tried > 3:
            raise KeyboardInterrupt
        return try_out(asked, trial)

    monkeypatch.setattr("twostroke.sim.planner.search.try_out", interrupted)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0})
    flags = PlanFlags(
        space(model, "2", budgets=(512,), sequences=(64,)),
        TrafficSpec(lengths="500/50", rate="2", seconds=20),
        SloLimits(ttft_s=1.0),
        FleetSpec(ReplicaSpec(model)),
        0.95, EXACT, EXACT, 4, 60, True, None, None, "",
    )  # fmt: skip
    console = Console(record=True, width=200)
    assert plan(flags, console) == 130
    text = console.export_text()
    assert "Interrupted after 3 simulations" in text
    assert text.count("one pool: ") + text.count("two pools: ") == 3


def test_two_pool_values(tmp_path: Path) -> None:
    reads, writes = ReplicaSpec("m", tp=4, budget_tokens=8192), ReplicaSpec("m", gpu="h200", tp=2, sequences=64)
    values.write(tmp_path, Config(3, 2, 0, reads, writes))
    compose = (tmp_path / "compose.plan.yaml").read_text()
    assert (
        '  prefill:\n    deploy: { replicas: 3 }\n    environment:\n      TWOSTROKE_STEP_BUDGET_TOKENS: "8192"'
        in compose
    )
    assert "  decode:\n    deploy: { replicas: 2 }" in compose
    assert 'TWOSTROKE_MAX_SEQUENCES: "64"\n      TWOSTROKE_TENSOR_PARALLEL: "2"' in compose
    assert "gpuType: h200" in (tmp_path / "kubernetes-values.yaml").read_text()
