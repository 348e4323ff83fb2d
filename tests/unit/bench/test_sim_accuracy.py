"""What the accuracy benchmark makes of errors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twostroke.bench import sim_accuracy
from twostroke.bench.record import Record
from twostroke.bench.sim_accuracy import Held
from twostroke.errors import ConfigError
from twostroke.sim.perf import fitted, runs
from twostroke.sim.perf.measured import Prepared, prepare

DATA = Path(__file__).parents[2] / "data" / "calibration"


@pytest.fixture(scope="module")
def few() -> list[Prepared]:
    measured = [run for run in runs.read(DATA) if run.prefill is None and run.workload.concurrency <= 8]
    return prepare(measured[:10])


def test_errors_are_shares_of_the_measured(few: list[Prepared]) -> None:
    errors = np.log(np.array([[1.2, 1.0 + index / 100] for index in range(10)]))
    row = Held(few, errors).row("part", "group")
    assert row["ttft"] == pytest.approx(0.2)
    assert row["tpot"] == pytest.approx(0.045)
    assert row["tpot_p90"] == pytest.approx(0.081)
    assert row["runs"] == 10


def test_coverage_counts_measurements_within_the_interval(few: list[Prepared]) -> None:
    known = replace(fitted.shipped(), spreads={depth: fitted.Spread(2.0, 1.1) for depth in fitted.DEPTHS})
    errors = np.log(np.array([[1.5, 1.05]] * 7 + [[3.0, 1.2]] * 3))
    assert Held(few, errors).covered(known) == pytest.approx([0.7, 0.7])


def test_parts_hold_every_run_once(few: list[Prepared]) -> None:
    held = Held(few, np.zeros((10, 2)))
    assert sum(len(part.runs) for _, part in held.by(lambda each: str(each.run.workload.concurrency))) == 10


def test_a_missed_goal_is_not_ok(few: list[Prepared]) -> None:
    known = replace(fitted.shipped(), spreads={depth: fitted.Spread(2.0, 2.0) for depth in fitted.DEPTHS})
    good, bad = (
        sim_accuracy._checks(Held(few, np.full((10, 2), error)), known, transfer_error)
        for error, transfer_error in ((0.04, 0.05), (0.3, 0.2))
    )
    assert [check.ok for check in good] == [True, True, True, True, False, False]  # all of ten lie within
    assert [check.ok for check in bad][:4] == [False] * 4
    assert "TPOT median error at most 5 %, 90th percentile at most 15 %" in good[0].name


def test_the_project_s_own_sample_is_the_last_resort(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "calibration").mkdir()
    (tmp_path / "calibration" / runs.SAMPLE).touch()
    assert sim_accuracy._folder(tmp_path) == tmp_path / "calibration"
    assert sim_accuracy._folder(tmp_path / "none") == sim_accuracy.DATA
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"aic_silicon_sample\.csv"):
        sim_accuracy.accuracy(Record("x", "x"), tmp_path / "none")


def test_never_fitted_profiles_are_rows() -> None:
    rows = sim_accuracy._splitwise(DATA / sim_accuracy.SPLITWISE)
    assert {row["group"] for row in rows} >= {"llama2-70b on h100-80gb", "bloom-176b on a100-80gb"}
    assert all(0 < float(row["tpot"] or 0) < 1 for row in rows)
