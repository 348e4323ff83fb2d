"""`python -m twostroke.sim.perf.calibration --data FOLDER`: fits the efficiencies and writes the package's data file.

Deterministic, takes minutes. What is fitted on: selection.py; how: fit.py; how good it is: bench/sim_accuracy.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from twostroke.errors import TwostrokeError
from twostroke.sim.perf import fitted, runs
from twostroke.sim.perf.fit import Fitted, fit
from twostroke.sim.perf.fitted import DEPTHS, Calibration, Spread, factor_of
from twostroke.sim.perf.levels import efficiencies
from twostroke.sim.perf.measured import Prepared, prepare, setting_of
from twostroke.sim.perf.measured_pools import PoolRun, prepare_pools, simulate
from twostroke.sim.perf.selection import choose

Floats = NDArray[np.float64]

_FOLDS = 10
_FEW = 25
_LEFT_OUT_SHARE = 0.632
DATA_FILE = Path(fitted.__file__).with_name("efficiencies.json")


@dataclass(frozen=True, slots=True)
class Sample:
    """All runs, ready. chosen: of both, aggregated first, the indices that are fitted on."""

    one_pool: list[Prepared]
    two_pools: list[PoolRun]
    chosen: list[int]

    @property
    def all(self) -> list[Prepared | PoolRun]:
        """Aggregated runs, then disaggregated ones."""
        return [*self.one_pool, *self.two_pools]

    @property
    def fitted_on(self) -> list[Prepared | PoolRun]:
        """Those of them that are chosen."""
        every = self.all
        return [every[index] for index in self.chosen]


def sample(folder: Path) -> Sample:
    """Reads and prepares the runs, and chooses. Raises ConfigError."""
    measured = runs.read(folder)
    one_pool = prepare([run for run in measured if run.prefill is None])
    chosen = choose(one_pool)
    first = fit([one_pool[index] for index in chosen])
    apart = [run for run in measured if run.prefill is not None]
    two_pools = prepare_pools(apart, [efficiencies(first.scaled(setting_of(run))) for run in apart])
    return Sample(one_pool, two_pools, chosen + [len(one_pool) + index for index in choose(two_pools)])


def errors(fit_of: Fitted, given: Sequence[Prepared | PoolRun]) -> Floats:
    """Logarithms of predicted over measured, TTFT and TPOT; runs on two pools are simulated for it."""
    found = []
    for each in given:
        scaled = fit_of.scaled(each.setting)
        if isinstance(each, Prepared):
            predicted = each.predict(scaled)
        else:
            predicted = np.log(simulate(each.run, efficiencies(scaled))[:2])
        found.append(predicted - each.observed)
    return np.array(found).reshape(-1, 2)


def calibrate(given: Sample) -> Calibration:
    """Fits, and finds how far predictions are off for runs that were not fitted on."""
    own = given.fitted_on
    whole = fit(own)
    known = Calibration(whole, {}, tuple(each.run.name for each in own))
    left_out = _left_out(own, whole, [index % _FOLDS for index in range(len(own))])
    unknown = _left_out(own, whole, [each.run.model for each in own])
    # Of a few runs each is worth much, so that without it a fit is worse than the whole one: Efron's .632 rule.
    usual = (1 - _LEFT_OUT_SHARE) * np.abs(errors(whole, own)) + _LEFT_OUT_SHARE * np.abs(left_out)
    return replace(known, spreads=spreads(known, own, usual, unknown))


def spreads(known: Calibration, own: Sequence[Prepared | PoolRun], usual: Floats, unknown: Floats) -> dict[str, Spread]:
    """How far predictions are off. usual: errors to expect of runs; unknown: when their whole model is left out."""
    depths = [known.depth(each.setting) for each in own]
    found = {DEPTHS[0]: _spread(usual), DEPTHS[2]: _spread(unknown)}
    found[DEPTHS[1]] = _between(found[DEPTHS[0]], found[DEPTHS[2]])
    for source in sorted({each.run.source for each in own}):
        rows = [i for i, each in enumerate(own) if each.run.source == source and depths[i] == DEPTHS[0]]
        if len(rows) >= _FEW:
            found[f"{DEPTHS[0]};{source}"] = _spread(usual[rows])
    return found


def _spread(found: Floats) -> Spread:
    return Spread(factor_of(found[:, 0]), factor_of(found[:, 1]))


def _between(first: Spread, second: Spread) -> Spread:
    """Half way between."""
    return Spread((first.ttft * second.ttft) ** 0.5, (first.tpot * second.tpot) ** 0.5)


def _left_out(own: Sequence[Prepared | PoolRun], start: Fitted, parts: Sequence[Hashable]) -> Floats:
    """Errors of each run when its part is not fitted on."""
    found = np.zeros((len(own), 2))
    for part in dict.fromkeys(parts):
        rest = fit([each for each, its in zip(own, parts, strict=True) if its != part], start)
        rows = [index for index, its in enumerate(parts) if its == part]
        found[rows] = errors(rest, [own[index] for index in rows])
    return found


def without(given: Sample, start: Fitted, part_of: Callable[[Prepared | PoolRun], str]) -> dict[str, Floats]:
    """For every part (a family, a system): errors of all its runs when none of them is fitted on."""
    found = {}
    for part in sorted({part_of(each) for each in given.all}):
        rest = fit([each for each in given.fitted_on if part_of(each) != part], start)
        found[part] = errors(rest, [each for each in given.all if part_of(each) == part])
    return found


def main(
    data: Annotated[Path, typer.Option(help="Folder with the silicon sample.")],
    output: Annotated[Path, typer.Option(help="Where to write.")] = DATA_FILE,
) -> None:
    """Fits the efficiencies and writes them."""
    try:
        output.write_text(calibrate(sample(data)).to_json())
    except TwostrokeError as error:
        sys.exit(f"twostroke.sim.perf.calibration: {error.message}")


if __name__ == "__main__":
    typer.run(main)
