"""Published rows as runs."""

from collections import Counter
from pathlib import Path

import pytest

from twostroke.errors import ConfigError
from twostroke.sim.perf import runs
from twostroke.sim.perf.load import Workload
from twostroke.sim.perf.roofline import Parallel

DATA = Path(__file__).parents[3] / "data" / "calibration"


@pytest.fixture(scope="module")
def sample() -> list[runs.Run]:
    return runs.read(DATA)


def row(**changes: str) -> dict[str, str]:
    plain = {
        "id": "x",
        "silicon_data_source": "2026-04-06.csv; silicon_concurrency=64",
        "backend": "vllm",
        "backend_version": "0.18.0",
        "model_path": "meta-llama/Llama-3.1-70B",
        "system": "h200_sxm",
        "precision": "fp8",
        "mode": "agg",
        "isl": "1024",
        "osl": "1024",
        "gemm_quant_mode": "fp8",
        "moe_quant_mode": "fp8",
        "batch_size": "64",
        "tp_size": "8",
        "pp_size": "1",
        "attention_dp_size": "1",
        "moe_tp_size": "8",
        "moe_ep_size": "1",
        "silicon_ttft_ms": "250",
        "silicon_tpot_ms": "20",
    }
    return plain | changes


def test_the_sample_is_read(sample: list[runs.Run]) -> None:
    kinds = Counter(run.prefill is not None for run in sample)
    assert kinds[False] > 2000
    assert kinds[True] > 250
    assert len({run.model for run in sample}) == 10
    assert all(run.ttft_s > 0 and 0.001 < run.tpot_s < 1 for run in sample)


def test_a_published_run_has_the_script_s_lengths() -> None:
    (run,) = runs.from_rows([row()])
    assert run.workload == Workload(64, 1024, 1024, 0.8, 10)
    assert (run.scheduler.budget_tokens, run.scheduler.max_sequences) == (8192, 64)
    assert (run.ttft_s, run.tpot_s) == (0.25, 0.02)


def test_a_search_is_told_by_its_loads() -> None:
    vendor = "source_file=x/aic-auto-gap-analysis/data/h200_sxm/f.csv; silicon_concurrency="
    round_loads = runs.from_rows([row(silicon_data_source=vendor + load) for load in ("8", "16")])
    searched = runs.from_rows([row(silicon_data_source=vendor + load) for load in ("8", "17")])
    assert {run.source for run in round_loads} == {"vendor"}
    assert {run.source for run in searched} == {"search"}


def test_layouts_that_were_multiplied_are_mended() -> None:
    wide = row(tp_size="64", moe_tp_size="8", moe_ep_size="8")
    replicas = row(tp_size="1", attention_dp_size="64", moe_tp_size="8", moe_ep_size="8")
    assert runs.from_rows([wide])[0].decode.parallel == Parallel(tp=8, ep=8)
    assert runs.from_rows([replicas])[0].decode.parallel == Parallel(dp=8, ep=8)


def test_repeats_and_incomplete_rows_are_left_out() -> None:
    apart = row(mode="disagg", prefill_num_workers="", decode_num_workers="")
    assert len(runs.from_rows([row(), row(), apart])) == 1


def test_a_folder_without_the_sample_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"aic_silicon_sample\.csv"):
        runs.read(tmp_path)


def test_unknown_engines_are_named() -> None:
    with pytest.raises(ConfigError, match="no engine x"):
        runs.usual_scheduler("x")
