"""The fit, and what comes with the package."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.sim.perf import catalogue, fitted, hardware, runs
from twostroke.sim.perf.fit import Fitted, fit
from twostroke.sim.perf.levels import LEVELS, PRIOR, Setting, efficiencies, groups
from twostroke.sim.perf.measured import Prepared, prepare
from twostroke.sim.perf.roofline import EFFICIENCY_NAMES, precision
from twostroke.sim.perf.selection import choose

DATA = Path(__file__).parents[3] / "data" / "calibration"


@pytest.fixture(scope="module")
def measured() -> list[runs.Run]:
    return [run for run in runs.read(DATA) if run.prefill is None]


@pytest.fixture(scope="module")
def some(measured: list[runs.Run]) -> list[Prepared]:
    wanted = [run for run in measured if run.model == "llama-3.1-70b" and run.system == "h200_sxm"]
    return prepare(wanted[::4])


def test_the_typical_efficiencies_are_the_prior() -> None:
    given = efficiencies(PRIOR)
    assert given.weights == pytest.approx(0.75)
    assert given.hop_s == pytest.approx(8e-6)
    assert EFFICIENCY_NAMES[0] == "weights"


def test_the_choice_takes_at_most_a_tenth_and_no_measured_value(some: list[Prepared]) -> None:
    chosen = choose(some)
    assert len(chosen) == len(some) // 10
    shuffled = [replace(each, observed=each.observed[::-1]) for each in some]
    assert choose(shuffled) == chosen


def test_a_fit_explains_what_it_saw(some: list[Prepared]) -> None:
    before = np.abs(Fitted({}).errors(some))
    after = np.abs(fit(some[::3]).errors(some))
    assert np.median(after[:, 1]) < 0.05 < np.median(before[:, 1])
    assert np.median(after[:, 0]) < 0.5 * np.median(before[:, 0])


def test_a_fit_goes_on_from_another(some: list[Prepared]) -> None:
    whole = fit(some[::3])
    again = fit(some[::3], whole)
    key = groups(some[0].setting)[0]
    assert again.added[key] == pytest.approx(whole.added[key], abs=0.05)


def test_an_outlier_does_not_bend_the_rest(some: list[Prepared]) -> None:
    own = some[::3]
    wrong = [replace(own[0], observed=own[0].observed + 2.0), *own[1:]]
    errors = np.abs(fit(wrong).errors(own[1:]))
    assert np.median(errors[:, 1]) < 0.05


def test_unknown_groups_add_nothing() -> None:
    setting = Setting("no-engine", "no-model", "no-family", "no-system", "no-generation", "no-precision", "no-source")
    known = fitted.shipped().fitted
    assert known.scaled(setting) == pytest.approx(PRIOR + known.added["all"])
    assert len(groups(setting)) == len(LEVELS)


def test_the_package_was_fitted_on_a_tenth(measured: list[runs.Run]) -> None:
    used = set(fitted.shipped().runs)
    every = Counter(run.group for run in measured)
    fitted_on = Counter(run.group for run in measured if run.name in used)
    assert sum(fitted_on.values()) > 150
    assert all(count <= max(1, every[group] // 10) for group, count in fitted_on.items())


def test_the_package_predicts_what_it_was_not_fitted_on(measured: list[runs.Run]) -> None:
    used = set(fitted.shipped().runs)
    rest = [run for run in measured if run.name not in used][::12]
    errors = np.abs(np.expm1(fitted.shipped().fitted.errors(prepare(rest))))
    assert len(rest) > 100
    assert np.median(errors[:, 1]) < 0.05
    assert np.median(errors[:, 0]) < 0.17


def test_a_file_holds_the_whole_calibration() -> None:
    shipped = fitted.shipped()
    again = fitted.from_json(shipped.to_json())
    assert again.spreads == shipped.spreads
    assert again.runs == shipped.runs
    assert again.fitted.added["all"] == pytest.approx(shipped.fitted.added["all"])


def test_a_file_of_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match="another version"):
        fitted.from_json('{"format": "x"}')


def test_intervals_widen_with_ignorance() -> None:
    sheet = hardware.find("h200")
    known, new = catalogue.find("llama-3.1-70b"), catalogue.find("mixtral-8x7b")
    depths = {}
    for shape in (known, new):
        how = precision("fp8", shape, sheet)
        depths[shape.name] = fitted.shipped().depth(fitted.setting(shape, sheet, how))
        low, high = fitted.interval(1.0, shape, sheet, how)
        assert low == pytest.approx(1 / high)
        assert 1.02 < high < 3
    assert depths == {"llama-3.1-70b": "cell", "mixtral-8x7b": "new"}
    how = precision("fp8", known, sheet)
    assert fitted.interval(1.0, new, sheet, how)[1] > fitted.interval(1.0, known, sheet, how)[1]


def test_nine_of_ten_lie_within_the_factor() -> None:
    errors = np.linspace(-1, 1, 2001)
    assert np.log(fitted.factor_of(errors)) == pytest.approx(0.9, abs=0.01)
    assert fitted.factor_of(np.array([0.5])) == pytest.approx(np.exp(0.5))
