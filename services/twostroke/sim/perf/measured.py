"""A measured run, ready to be predicted with any efficiencies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from twostroke.sim.perf.closed_loop import Schedule, schedule
from twostroke.sim.perf.levels import Setting, efficiencies
from twostroke.sim.perf.roofline import RooflineStepModel
from twostroke.sim.perf.runs import Run

Floats = NDArray[np.float64]

_FEW = 8  # requests
_MOST_SHARE = 0.97
_LEAST_RESERVE_BYTES = 2e9


def setting_of(run: Run) -> Setting:
    """The run's setting."""
    return Setting(
        engine=run.engine,
        model=run.model,
        family=run.shape.family,
        system=run.system,
        generation=run.hardware.generation,
        precision=run.precision.name,
        source=run.source,
        version=run.version,
    )


class Fittable(Protocol):
    """A run that efficiencies can be fitted on; see Prepared."""

    @property
    def run(self) -> Run: ...
    @property
    def setting(self) -> Setting: ...
    @property
    def pressed(self) -> bool: ...
    @property
    def observed(self) -> Floats: ...
    def predict(self, scaled: Floats) -> Floats:
        """See Prepared."""
        ...


@dataclass(frozen=True, slots=True)
class Prepared:
    """An aggregated run whose steps are known; only what they take is not."""

    run: Run
    setting: Setting
    model: RooflineStepModel
    schedule: Schedule
    pressed: bool
    """Whether KV for all requests at once does not fit, so that times hang on what exactly the engine reserves."""
    observed: Floats
    """Logarithms of the measured mean time to first token and mean time between tokens, seconds."""

    def predict(self, scaled: Floats) -> Floats:
        """Logarithms of the same, predicted. scaled: efficiencies on the fit's scale, or several rows of them."""
        given = efficiencies(scaled)
        model, steps = replace(self.model, efficiencies=given), self.schedule
        base_s = model.base_s(steps.sequences, steps.prefill_tokens, steps.prefill_pairs, steps.prefill_chunks)
        ttft_s, tpot_s, _ = steps.times(base_s, model.context_token_s())
        before_s = given.first_token_s + given.first_token_per_token_s * steps.inputs.mean()
        mean_ttft_s = ttft_s.mean(axis=-1) + np.squeeze(before_s)
        return np.asarray(np.log(np.stack([mean_ttft_s, tpot_s.mean(axis=-1)], axis=-1)))


def prepare(runs: list[Run]) -> list[Prepared]:
    """Schedules aggregated runs; equal schedules are made once."""
    made: dict[tuple[object, ...], Schedule] = {}
    found = []
    for run in runs:
        model = RooflineStepModel(run.shape, run.hardware, run.precision, run.decode.parallel)
        work = run.workload
        whole = work.input_tokens + work.output_tokens
        capacity = model.kv_capacity_tokens(run.memory_share, run.free_share)
        if capacity < _FEW * whole:
            # It ran, so whoever ran it gave the engine what memory there was.
            capacity = max(capacity, model.kv_capacity_tokens(_MOST_SHARE, 1.0, _LEAST_RESERVE_BYTES))
        enough = 2 * work.concurrency * whole
        key = (work, run.scheduler, min(capacity, enough))
        if key not in made:
            made[key] = schedule(work, run.scheduler, capacity)
        observed = np.log([run.ttft_s, run.tpot_s])
        found.append(Prepared(run, setting_of(run), model, made[key], capacity < enough / 2, observed))
    return found
