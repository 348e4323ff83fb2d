"""Measured runs on two pools: predicted by simulation in time, fitted by the decode batches that it finds."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from twostroke.sim.perf.levels import Setting, efficiencies
from twostroke.sim.perf.measured import setting_of
from twostroke.sim.perf.roofline import Efficiencies, RooflineStepModel
from twostroke.sim.perf.runs import Run
from twostroke.sim.perf.transfer import TransferModel
from twostroke.sim.perf.two_pools import Pools, closed_loop

Floats = NDArray[np.float64]

_REQUESTS = 6000
_LEAST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class PoolRun:
    """A disaggregated run of which the decode batch is known. Like Prepared, but only its decode steps are fitted."""

    run: Run
    setting: Setting
    model: RooflineStepModel
    batch: float
    pressed: bool
    observed: Floats

    def predict(self, scaled: Floats) -> Floats:
        """Like Prepared.predict; the time to first token is the measured one, as it is not fitted."""
        model = replace(self.model, efficiencies=efficiencies(scaled))
        work = self.run.workload
        context = self.batch * (1 + work.shortest) / 2 * (work.input_tokens + work.output_tokens / 2)
        step_s = model.base_s(self.batch, 0, 0.0, 0) + model.context_token_s() * context
        tpot = np.log(np.squeeze(step_s))
        return np.stack([np.full_like(tpot, self.observed[0]), tpot], axis=-1)


def simulate(run: Run, given: Efficiencies) -> tuple[float, float, float]:
    """(mean time to first token, mean time between tokens, mean requests per decode worker); seconds."""
    assert run.prefill is not None
    model = RooflineStepModel(run.shape, run.hardware, run.precision, run.decode.parallel, given)
    prefill, work = run.prefill, run.workload
    link = TransferModel(links=run.decode.parallel.tp, link_bytes_per_s=run.hardware.network_bytes_per_s)
    kv_bytes = run.shape.kv_bytes_per_token(run.precision.kv_bytes)
    pools = Pools(
        prefill=replace(model, parallel=prefill.parallel),
        prefill_workers=prefill.workers,
        prefill_budget_tokens=max(run.scheduler.budget_tokens // run.decode.parallel.dp, work.input_tokens)
        * prefill.parallel.dp,
        decode=model,
        decode_workers=run.decode.workers,
        decode_batch=max(run.decode.batch, 1) * run.decode.parallel.dp,
        transfer_s=lambda tokens: link.transfer_s(tokens * kv_bytes),
    )
    rounds = max(_LEAST_ROUNDS, min(work.rounds, _REQUESTS // work.concurrency))
    lengths = replace(work, rounds=rounds).lengths()
    ttft_s, tpot_s = closed_loop(pools, lengths, work.concurrency)
    first_s = given.first_token_s + given.first_token_per_token_s * work.input_tokens
    decoding_s = sum(each * (output - 1) for each, (_, output) in zip(tpot_s, lengths, strict=True))
    whole_s = (sum(ttft_s) + decoding_s) / work.concurrency
    return float(np.mean(ttft_s)) + first_s, float(np.mean(tpot_s)), decoding_s / whole_s / run.decode.workers


def unprepared(run: Run) -> PoolRun:
    """The run without its decode batch: to be simulated, not to be fitted on."""
    model = RooflineStepModel(run.shape, run.hardware, run.precision, run.decode.parallel)
    return PoolRun(run, setting_of(run), model, 1.0, False, np.log([run.ttft_s, run.tpot_s]))


def prepare_pools(runs: list[Run], given: list[Efficiencies]) -> list[PoolRun]:
    """Finds each run's decode batch with the efficiencies that are known so far."""
    return [
        replace(unprepared(run), batch=max(simulate(run, efficiency)[2], 1.0))
        for run, efficiency in zip(runs, given, strict=True)
    ]
