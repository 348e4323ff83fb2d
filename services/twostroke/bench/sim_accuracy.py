"""How far the performance model's predictions are from published measurements that it was not fitted on.

Part of `make bench-sim`; `python -m twostroke.bench.sim_accuracy --data FOLDER` runs it alone. Errors are
|predicted - measured| / measured of a run's mean time to first token and mean time between tokens.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from numpy.typing import NDArray

from twostroke.bench.command import command_line, finish, make_console
from twostroke.bench.record import Check, Record, Value
from twostroke.errors import TwostrokeError
from twostroke.measures import SloLimits
from twostroke.policy.step_model import StepBatch, chunk_pairs
from twostroke.sim.cluster import Cluster
from twostroke.sim.perf import calibration, catalogue, fitted, hardware, runs
from twostroke.sim.perf.calibration import Sample
from twostroke.sim.perf.fitted import Calibration
from twostroke.sim.perf.measured import Prepared, prepare
from twostroke.sim.perf.measured_pools import PoolRun, unprepared
from twostroke.sim.perf.roofline import Parallel, RooflineStepModel, precision
from twostroke.sim.perf.transfer import MOONCAKE_TABLES
from twostroke.sim.replica import ReplicaSpec
from twostroke.sim.scenario import FleetSpec, TrafficSpec, make_placer
from twostroke.sim.summary import summarise

Floats = NDArray[np.float64]
Row = dict[str, Value]
AnyRun = Prepared | PoolRun

DATA = Path("tests") / "data" / "calibration"
SPLITWISE = "splitwise_medians.csv"
REPLAYED = (
    ("vllm_rtx4090_llama_3_1_8b.csv", ReplicaSpec("llama-3.1-8b", gpu="rtx4090", budget_tokens=2048, sequences=128)),
    (
        "vllm_rtxpro6000_llama_3_1_8b.csv",
        ReplicaSpec("llama-3.1-8b", gpu="rtxpro6000", budget_tokens=2048, sequences=128),
    ),
    (
        "vllm_rtxpro6000_qwen3_32b.csv",
        ReplicaSpec("qwen3-32b", gpu="rtxpro6000", tp=2, budget_tokens=2048, sequences=128),
    ),
)
"""Traces that vLLM 0.19 served, and the server's settings."""


@dataclass(frozen=True, slots=True)
class Held:
    """Runs that were not fitted on. errors: logarithms of predicted over measured, TTFT and TPOT."""

    runs: Sequence[AnyRun]
    errors: Floats

    def row(self, part: str, group: str, calibration_of: Calibration | None = None) -> Row:
        """Their figures: median and 90th percentile of the errors, as shares.

        calibration_of: adds the share of measurements that lie in its 90 % intervals (ttft_in, tpot_in).
        """
        sizes = np.abs(np.expm1(self.errors))
        row: Row = {"part": part, "group": group, "runs": len(self.runs)}
        for index, name in enumerate(("ttft", "tpot")):
            row[name] = float(np.median(sizes[:, index]))
            row[f"{name}_p90"] = float(np.quantile(sizes[:, index], 0.9))
        if calibration_of is not None:
            row["ttft_in"], row["tpot_in"] = (float(each) for each in self.covered(calibration_of))
        return row

    def covered(self, calibration_of: Calibration) -> Floats:
        """Share of measurements within the 90 % intervals, TTFT and TPOT."""
        spreads = [calibration_of.spread(each.setting) for each in self.runs]
        wide = np.log([(each.ttft, each.tpot) for each in spreads])
        return np.asarray((np.abs(self.errors) <= wide).mean(axis=0))

    def by(self, key: Callable[[AnyRun], str]) -> Iterator[tuple[str, Held]]:
        """Parts by a key, in order."""
        keys = [key(each) for each in self.runs]
        for wanted in sorted(set(keys)):
            rows = [index for index, each in enumerate(keys) if each == wanted]
            yield wanted, Held([self.runs[index] for index in rows], self.errors[rows])


def accuracy(record: Record, data: Path = DATA, left_out: bool = True) -> None:
    """Adds rows and checks. left_out: also fits again without each family and each system, which takes minutes.

    data: a folder with the silicon sample, itself or in its folder calibration; else the sample that lies beside the
    tests is taken. Raises ConfigError when there is none.
    """
    rows, checks = figures(_folder(data), left_out)
    for row in rows:
        record.row(**row)
    record.checks += checks


def unseen(record: Record, data: Path = DATA) -> None:
    """Adds rows: one pool, every family and every system by a fit that never saw it. Takes minutes; see accuracy."""
    alone = prepare([run for run in runs.read(_folder(data)) if run.prefill is None])
    for row in _left_out(alone, fitted.shipped()):
        record.row(**row)


def _folder(data: Path) -> Path:
    names = (runs.SAMPLE, f"{runs.SAMPLE}.gz")
    places = (data, data / "calibration")
    return next((place for place in places if any((place / name).exists() for name in names)), DATA)


def figures(data: Path, left_out: bool) -> tuple[list[Row], list[Check]]:
    """The rows and checks themselves."""
    known = fitted.shipped()
    measured = runs.read(data)
    alone = prepare([run for run in measured if run.prefill is None])
    one_pool = _held(known, alone)
    two_pools = _held(known, [unprepared(run) for run in measured if run.prefill is not None])
    whole = one_pool.row("one pool", "all", known)
    rows = [whole]
    for part, key in _PARTS:
        rows += [held.row(f"one pool by {part}", name, known) for name, held in one_pool.by(key)]
    rows.append(two_pools.row("two pools", "all", known))
    rows += [held.row("two pools by system", name, known) for name, held in two_pools.by(lambda each: each.run.system)]
    if left_out:
        rows += _left_out(alone, known)
    transfers = _transfers()
    rows += transfers
    rows += _splitwise(DATA / SPLITWISE)
    rows += [_replayed(DATA / name, spec) for name, spec in REPLAYED]
    return rows, _checks(one_pool, known, max(_number(row["transfer"]) for row in transfers))


_PARTS: tuple[tuple[str, Callable[[AnyRun], str]], ...] = (
    ("family", lambda each: each.run.model),
    ("system", lambda each: each.run.system),
    ("engine", lambda each: each.run.engine),
    ("source", lambda each: each.run.source),
    ("architecture", lambda each: each.run.shape.family),
)


def _held(known: Calibration, given: Sequence[AnyRun]) -> Held:
    used = set(known.runs)
    rest = [each for each in given if each.run.name not in used]
    return Held(rest, calibration.errors(known.fitted, rest))


def _left_out(alone: list[Prepared], known: Calibration) -> list[Row]:
    """One pool only: figures of every family, and of every system, by a fit that never saw it."""
    used = set(known.runs)
    sample = Sample(alone, [], [index for index, each in enumerate(alone) if each.run.name in used])
    spread = np.log([known.spreads[fitted.DEPTHS[2]].ttft, known.spreads[fitted.DEPTHS[2]].tpot])
    rows: list[Row] = []
    for part, key in _PARTS[:2]:
        for name, errors in calibration.without(sample, known.fitted, key).items():
            row = Held([each for each in alone if key(each) == name], errors).row(f"{part} left out", name)
            covered = (np.abs(errors) <= spread).mean(axis=0)
            rows.append({**row, "ttft_in": float(covered[0]), "tpot_in": float(covered[1])})
    return rows


def _transfers() -> list[Row]:
    rows: list[Row] = []
    for table in MOONCAKE_TABLES:
        model = table.fit()
        for size, tokens, measured_s in zip(table.sizes_bytes(), table.tokens, table.seconds, strict=True):
            predicted_s = model.transfer_s(size)
            rows.append(
                {
                    "part": "KV transfer",
                    "group": f"{table.name}, {tokens} tokens",
                    "transfer": abs(predicted_s / measured_s - 1),
                }
            )
    return rows


def _splitwise(path: Path) -> list[Row]:
    """Another engine, older hardware and models that were never fitted on: what the physics alone is worth."""
    errors: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for line in csv.DictReader(path.read_text().splitlines()):
        shape, sheet = catalogue.find(line["model"]), hardware.find(line["hardware"])
        quantised = precision("bf16", shape, sheet)
        known = fitted.fitted_efficiencies(shape, sheet, quantised)
        model = RooflineStepModel(shape, sheet, quantised, Parallel(tp=int(line["tensor_parallel"])), known)
        prompt, batch = int(line["prompt_tokens"]), int(line["batch"])
        prefill_s = model.step_s(StepBatch(0, 0, batch * prompt, batch * chunk_pairs(0, prompt), batch))
        decode_s = model.step_s(StepBatch(batch, batch * prompt, 0, 0.0))
        errors.setdefault((line["model"], line["hardware"]), []).append(
            (np.log(prefill_s * 1e3 / float(line["prompt_ms"])), np.log(decode_s * 1e3 / float(line["token_ms"])))
        )
    rows: list[Row] = []
    for (model_name, system), found in errors.items():
        sizes = np.abs(np.expm1(np.array(found)))
        rows.append(
            {
                "part": "never fitted: Splitwise profile",
                "group": f"{model_name} on {system}",
                "runs": len(found),
                "ttft": float(np.median(sizes[:, 0])),
                "tpot": float(np.median(sizes[:, 1])),
            }
        )
    return rows


def _replayed(path: Path, spec: ReplicaSpec) -> Row:
    """A served trace on a card that was never fitted on, simulated with its queue."""
    traffic, slo = TrafficSpec(trace=path).make(), SloLimits()
    fleet = FleetSpec(spec, both=1).make(traffic)
    cluster = Cluster(fleet, traffic, make_placer("round-robin", fleet, traffic, slo))
    cluster.run()
    found = summarise(cluster, slo)
    lines = list(csv.DictReader(path.read_text().splitlines()))
    ttft_s, tpot_s = (float(np.mean([float(line[name]) for line in lines])) for name in ("ttft_s", "tpot_s"))
    return {
        "part": "never fitted: replayed trace",
        "group": f"{spec.model} on {spec.tp} x {spec.gpu}",
        "runs": len(lines),
        "ttft": abs(found.ttft.mean / ttft_s - 1),
        "tpot": abs(found.tpot.mean / tpot_s - 1),
    }


def _checks(one_pool: Held, known: Calibration, transfer_error: float) -> list[Check]:
    sizes = np.abs(np.expm1(one_pool.errors))
    ttft, tpot, tpot_p90 = np.median(sizes[:, 0]), np.median(sizes[:, 1]), np.quantile(sizes[:, 1], 0.9)
    covered = one_pool.covered(known)
    words = "TPOT median error at most 5 %, 90th percentile at most 15 %"
    cover = "90 % intervals cover 85 to 95 %"
    return [
        _check(f"{words}: median", tpot, tpot <= 0.05, "at most 5 %"),
        _check(f"{words}: 90th percentile", tpot_p90, tpot_p90 <= 0.15, "at most 15 %"),
        _check("TTFT median at most 15 %", ttft, ttft <= 0.15, "at most 15 %"),
        _check("Mooncake KV transfer tables within 10 % from 1k tokens", transfer_error, transfer_error <= 0.1, "10 %"),
        _check(f"{cover}: TPOT", covered[1], 0.85 <= covered[1] <= 0.95, "85 to 95 %"),
        _check(f"{cover}: TTFT", covered[0], 0.85 <= covered[0] <= 0.95, "85 to 95 %"),
    ]


def _check(name: str, share: float, ok: bool, goal: str) -> Check:
    return Check(name, float(share) * 100, "%", goal, bool(ok))


def _number(value: Value) -> float:
    assert isinstance(value, float)
    return value


def main(
    data: Annotated[Path, typer.Option(help="Folder with the measurements.")] = DATA,
    quick: Annotated[bool, typer.Option("--quick", help="Without the fits that leave a family or system out.")] = False,
) -> None:
    """Prints the table and writes build/bench/sim_accuracy.json."""
    record = Record("sim_accuracy", command_line("sim_accuracy"))
    try:
        accuracy(record, data, not quick)
    except TwostrokeError as error:
        sys.exit(f"twostroke.bench.sim_accuracy: {error.message}")
    finish(record, make_console())


if __name__ == "__main__":
    typer.run(main)
