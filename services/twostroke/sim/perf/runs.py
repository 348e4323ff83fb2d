"""Published measurements as runs that can be repeated in simulation.

A row of the silicon sample says what was measured; how the server and the client were started comes from the public
scripts of the benchmark it was taken from, in _RECIPES. Nothing here looks at a measured value, except to drop rows
that repeat an earlier one.
"""

from __future__ import annotations

import csv
import gzip
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from twostroke.errors import ConfigError
from twostroke.sim.perf import catalogue, hardware
from twostroke.sim.perf.hardware import Hardware
from twostroke.sim.perf.load import Scheduler, Workload
from twostroke.sim.perf.model_shape import ModelShape
from twostroke.sim.perf.roofline import Parallel, Precision, precision

SAMPLE = "aic_silicon_sample.csv"


@dataclass(frozen=True, slots=True)
class Pool:
    """Workers of one kind. batch: requests that one of them holds at most; 0 where the row does not say."""

    workers: int
    parallel: Parallel
    batch: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run.

    source: "published" for the nightly public benchmark; "vendor", "search" and "dynamo" for the vendor's own runs: at
        round loads, at the loads that a search found, behind its own router.
    memory_share, free_share: see RooflineStepModel.kv_capacity_tokens.
    prefill: the prefill pool of a disaggregated run; decode: the workers of an aggregated one, or the decode pool.
    """

    name: str
    model: str
    system: str
    engine: str
    version: str
    source: str
    shape: ModelShape
    hardware: Hardware
    precision: Precision
    workload: Workload
    scheduler: Scheduler
    memory_share: float
    free_share: float
    prefill: Pool | None
    decode: Pool
    ttft_s: float
    tpot_s: float

    @property
    def group(self) -> tuple[str, str]:
        """(model, system), of which at most a tenth is fitted on."""
        return self.model, self.system


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What a public script sets where it differs from the engine's usual; empty fields match everything."""

    engine: str = ""
    model: str = ""
    system: str = ""
    precision: str = ""
    budget_tokens: int = 0
    kv_bytes: float = 0.0
    poll_steps: int = 0
    rounds: int = 0
    memory_share: float = 0.0
    hold_steps: int = 0


# Later lines win. Scripts of SemiAnalysisAI/InferenceX, folder benchmarks.
_RECIPES = (
    _Recipe(kv_bytes=1),
    _Recipe(engine="trtllm", model="llama-3.1-70b", hold_steps=20),
    _Recipe(engine="trtllm", model="gpt-oss-120b", budget_tokens=20000),
    _Recipe(engine="vllm", model="kimi-k2", kv_bytes=2, memory_share=0.95),
    _Recipe(engine="vllm", model="gpt-oss-120b", system="h100_sxm", kv_bytes=2),
    _Recipe(engine="vllm", model="minimax-m2", budget_tokens=16384, memory_share=0.95),
    _Recipe(engine="vllm", model="minimax-m2", system="h100_sxm", budget_tokens=8192, kv_bytes=2),
    _Recipe(engine="sglang", budget_tokens=16384),
    _Recipe(engine="sglang", model="deepseek-v3", system="h200_sxm", budget_tokens=32768, kv_bytes=2),
    _Recipe(engine="sglang", model="deepseek-v3", system="b200_sxm", poll_steps=30),
    _Recipe(engine="sglang", model="deepseek-v3", system="b200_sxm", precision="fp8", budget_tokens=32768),
    _Recipe(engine="sglang", model="qwen3.5-397b-a17b", poll_steps=30),
    _Recipe(engine="sglang", model="glm-5", kv_bytes=2, budget_tokens=8192, rounds=5),
)
_PUBLISHED_SHORTEST = 0.8
_VENDOR_RAMP = 2
_BALANCE_STEPS = 10
_FEW_USERS = 16  # below, the scripts let SGLang look at its queue three times as often


def usual_scheduler(engine: str) -> Scheduler:
    """How an engine schedules when it is not told otherwise. Raises ConfigError for an unknown engine."""
    known = {
        "vllm": Scheduler(),
        "trtllm": Scheduler(chunked=False, reserve_output=True),
        "sglang": Scheduler(exclusive=True, reserve_output=True),
    }
    if engine not in known:
        raise ConfigError(f"no engine {engine}; known are {', '.join(known)}")
    return known[engine]


def read(folder: Path) -> list[Run]:
    """The sample's runs, repeats dropped. folder: holds the sample, plain or with .gz. Raises ConfigError."""
    path = folder / SAMPLE
    packed = path.with_suffix(".csv.gz")
    try:
        text = path.read_text() if path.exists() else gzip.decompress(packed.read_bytes()).decode()
        return from_rows(csv.DictReader(text.splitlines()))
    except OSError as error:
        raise ConfigError(f"no {SAMPLE}, plain or .gz, in {folder}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f"{path} lacks the column {error}") from error


def from_rows(rows: Iterable[Mapping[str, str]]) -> list[Run]:
    """Runs of rows in the sample's columns. Rows whose set-up is not given in full are left out, as are repeats."""
    kept = list(rows)
    searched = {_file(row) for row in kept if _concurrency(row) & (_concurrency(row) - 1)}
    found: dict[tuple[object, ...], Run] = {}
    for row in kept:
        run = _run(row, _file(row) in searched)
        if run is not None:
            key = (run.model, run.system, run.engine, run.workload, round(run.ttft_s, 6), round(run.tpot_s, 7))
            found.setdefault(key, run)
    return list(found.values())


def _file(row: Mapping[str, str]) -> str:
    """The file of the benchmark's own that a row was taken from."""
    return row["silicon_data_source"].split(";", 1)[0]


def _concurrency(row: Mapping[str, str]) -> int:
    """Users of a run; 0 where the row names none."""
    named = re.search(r"silicon_concurrency=(\d+)", row["silicon_data_source"])
    return int(named.group(1)) if named else 0


def _run(row: Mapping[str, str], searched: bool) -> Run | None:
    pools = _pools(row)
    if pools is None:
        return None
    prefill, decode = pools
    concurrency = _concurrency(row) or decode.batch * decode.parallel.dp * decode.workers
    source = _source(row["silicon_data_source"], searched)
    shape, device = catalogue.find(row["model_path"]), hardware.find(row["system"])
    model = catalogue.key_of(row["model_path"]) or row["model_path"]
    recipe = _merged(row["backend"], model, row["system"], row["precision"]) if source == "published" else _Recipe()
    workload = Workload(concurrency, int(row["isl"]), int(row["osl"]))
    if source == "published":
        workload = replace(workload, shortest=_PUBLISHED_SHORTEST, rounds=recipe.rounds or 10)
    elif source == "vendor":
        workload = replace(workload, ramp=_VENDOR_RAMP)
    else:
        workload = replace(workload, shortest=_PUBLISHED_SHORTEST, ramp=1)
    return Run(
        name=row["id"],
        model="deepseek-v3" if model == "deepseek-r1" else model,
        system=row["system"],
        engine=row["backend"],
        version=row["backend_version"],
        source=source,
        shape=shape,
        hardware=device,
        precision=precision(_quantised(row, shape), shape, device, recipe.kv_bytes or _usual_kv_bytes(row)),
        workload=workload,
        scheduler=_scheduler(row["backend"], recipe, workload, source, decode.parallel),
        memory_share=recipe.memory_share or (0.98 if row["backend"] == "trtllm" else 0.9),
        free_share=0.85 if row["backend"] == "trtllm" else 1.0,
        prefill=prefill,
        decode=decode,
        ttft_s=float(row["silicon_ttft_ms"]) / 1e3,
        tpot_s=float(row["silicon_tpot_ms"]) / 1e3,
    )


def _source(text: str, searched: bool) -> str:
    if "gap-analysis/data" not in text:
        return "published"
    if "gtl_" in text:
        return "dynamo"
    return "search" if searched else "vendor"


def _merged(engine: str, model: str, system: str, precision_name: str) -> _Recipe:
    model = "deepseek-v3" if model == "deepseek-r1" else model
    merged = _Recipe()
    for each in _RECIPES:
        wanted = ((each.engine, engine), (each.model, model), (each.system, system), (each.precision, precision_name))
        if all(not want or want == have for want, have in wanted):
            merged = _Recipe(
                budget_tokens=each.budget_tokens or merged.budget_tokens,
                kv_bytes=each.kv_bytes or merged.kv_bytes,
                poll_steps=each.poll_steps or merged.poll_steps,
                rounds=each.rounds or merged.rounds,
                memory_share=each.memory_share or merged.memory_share,
                hold_steps=each.hold_steps or merged.hold_steps,
            )
    return merged


def _scheduler(engine: str, recipe: _Recipe, workload: Workload, source: str, parallel: Parallel) -> Scheduler:
    usual = usual_scheduler(engine)
    budget = recipe.budget_tokens or usual.budget_tokens
    if not usual.chunked:
        budget = max(budget, workload.input_tokens + 64)
    poll = recipe.poll_steps or 1
    if poll > 1 and workload.concurrency < _FEW_USERS:
        poll = poll // 3
    # Every attention replica has its own budget.
    limit = workload.concurrency if source == "published" else usual.max_sequences
    hold_steps, hold_tokens = 0, 0
    if engine == "trtllm" and parallel.dp > 1:
        # Its attention replicas wait for each other's prompts, so that none computes alone.
        hold_steps, hold_tokens = _BALANCE_STEPS, int(0.8 * workload.input_tokens * parallel.dp)
    elif (
        engine == "trtllm" and recipe.hold_steps and workload.input_tokens == workload.output_tokens and parallel.tp < 8
    ):
        hold_steps, hold_tokens, budget = (
            recipe.hold_steps,
            int(0.9 * 2 * workload.input_tokens),
            2 * workload.input_tokens,
        )
    return replace(
        usual,
        budget_tokens=budget * parallel.dp,
        max_sequences=limit,
        poll_steps=poll,
        hold_steps=hold_steps,
        hold_tokens=hold_tokens,
    )


def _usual_kv_bytes(row: Mapping[str, str]) -> float:
    """TensorRT-LLM takes the KV type from a quantised checkpoint; the others keep the activations' type."""
    return 1 if row["backend"] == "trtllm" and row["gemm_quant_mode"] in ("fp8", "nvfp4") else 2


def _quantised(row: Mapping[str, str], shape: ModelShape) -> str:
    name = row["moe_quant_mode"] or row["gemm_quant_mode"] or row["precision"] or "bf16"
    if "gpt-oss" in row["model_path"]:
        return "mxfp4"  # its only form
    return {"int4_wo": "int4"}.get(name, name)


def _pools(row: Mapping[str, str]) -> tuple[Pool | None, Pool] | None:
    if row["mode"] == "agg":
        published = "gap-analysis/data" not in row["silicon_data_source"]
        return None, Pool(1, _parallel(row, "", mended=published), int(row["batch_size"]))
    if not row["prefill_num_workers"] or not row["decode_num_workers"]:
        return None
    prefill = Pool(int(row["prefill_num_workers"]), _parallel(row, "prefill_"))
    decode = Pool(int(row["decode_num_workers"]), _parallel(row, "decode_"), int(row["decode_batch_size"]))
    return prefill, decode


def _parallel(row: Mapping[str, str], side: str, mended: bool = False) -> Parallel:
    tp, dp, ep, shards = (
        int(row[f"{side}{name}"] or 1) or 1 for name in ("tp_size", "attention_dp_size", "moe_ep_size", "moe_tp_size")
    )
    if not row[f"{side}attention_dp_size"]:
        dp = max(ep * shards // tp, 1)
    if mended and shards == ep > 1 and tp * dp == ep * ep:
        # Some rows multiply both ways of splitting: the runs had ep accelerators, each with whole experts.
        tp, dp = (ep, 1) if dp == 1 else (1, ep)
    elif mended and tp > 1 and dp > 1 and tp * dp == ep:
        tp, dp, ep = tp, 1, tp
    return Parallel(tp=tp, pp=int(row[f"{side}pp_size"] or 1), dp=dp, ep=min(ep, tp * dp))
