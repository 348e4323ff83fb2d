"""`twostroke sim` and its errors, as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from twostroke.cli import main
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.replica import Profile


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "worker.json"
    step = LinearStepModel(0.01, 1e-4, 1e-8, 1e-4)
    Profile("tiny", "test", step, 4000, 16, 2048, 64, 1e5, 10, 1e-4, 0.01).save(path)
    return str(path)


def call(*argv: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    return int(ended.value.code or 0)


def test_two_pools(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    code = call(
        *("sim", "--model", model, "--prefill", "1", "--decode", "1", "--lengths", "400/40", "--rate", "2"),
        *("--seconds", "60", "--slo", "ttft=1s,itl=50ms", "--policy", "strict", "--json", str(out)),
    )
    assert code == 0
    text = capsys.readouterr().out
    assert "1 prefill (profile of tiny), 1 decode (profile of tiny)" in text
    result = json.loads(out.read_text())
    found = result["result"]
    assert result["complete"] is True
    assert found["finished"] == found["requests"] == found["handoffs"] > 80
    assert found["ttft"]["p50"] == pytest.approx(0.051, abs=0.002)
    assert sum(found["parts_s"].values()) == pytest.approx(found["e2e"]["mean"])


def test_modes_agree(model: str, tmp_path: Path) -> None:
    results = []
    for more in ((), ("--step-by-step",)):
        out = tmp_path / "result.json"
        fleet = ("--both", "2", "--lengths", "300/30/0.5", "--concurrency", "9", "--requests", "200")
        assert call("sim", "--model", model, *fleet, "--json", str(out), *more) == 0
        results.append(json.loads(out.read_text())["result"])
    assert results[0] == results[1]


def test_controllers(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = (
        "--lengths",
        "400/40",
        "--rate",
        "8-40/600",
        "--seconds",
        "900",
        "--start-s",
        "30",
        "--slo",
        "ttft=1s,tpot=50ms",
    )
    assert (
        call("sim", "--model", model, "--both", "1", *load, "--policy", "one-pool", "--autoscale", "--start-s", "30")
        == 0
    )
    text = capsys.readouterr().out
    assert "workers started" in text
    assert " 0 workers started" not in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--both", "1"), "no traffic: give --trace FILE"),
        (("--lengths", "10/10", "--rate", "1"), "give --both N, or --prefill N with --decode N"),
        (("--both", "1", "--lengths", "10/10", "--rate", "1", "--slo", "ttft=2"), "SLO 'ttft=2'"),
        (("--both", "1", "--lengths", "10/10", "--rate", "1", "--policy", "best"), "no policy best; known are all"),
        (("--both", "1", "--trace", "missing.csv"), "there is no trace missing.csv"),
    ],
)
def test_mistakes_are_one_line(
    model: str, argv: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("sim", "--model", model, *argv) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_model_that_does_not_fit_names_what_to_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert call("sim", "--model", "llama-3.1-405b", "--both", "1", "--lengths", "10/10", "--rate", "1") == 2
    assert "raise tp or pp, or quantise" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["sim", "plan", "profile"])
def test_help_teaches(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(name, "--help") == 0
    text = capsys.readouterr().out
    assert f"twostroke {name}" in text
    assert len(text.splitlines()) > 15
