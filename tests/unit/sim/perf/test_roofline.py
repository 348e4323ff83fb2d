"""Step times from shapes and sheets."""

from dataclasses import replace

import numpy as np
import pytest

from twostroke.errors import ConfigError
from twostroke.policy.step_model import StepBatch, chunk_pairs
from twostroke.sim.perf import catalogue, hardware
from twostroke.sim.perf.roofline import Efficiencies, Parallel, RooflineStepModel, precision


def model(name: str = "llama-3.1-70b", gpu: str = "h200", how: str = "fp8", **spread: int) -> RooflineStepModel:
    shape, sheet = catalogue.find(name), hardware.find(gpu)
    return RooflineStepModel(shape, sheet, precision(how, shape, sheet), Parallel(**spread))


MODELS = [
    model(tp=4),
    model("deepseek-v3", "b200", "nvfp4", dp=8, ep=8),
    model("gpt-oss-120b", "h100", "mxfp4", tp=2),
    model("qwen3.5-397b-a17b", "b300", "fp8", tp=4),
    model("glm-5", "h200", "fp8", tp=8),
    model("llama-3.1-8b", "a10", "bf16", pp=2),
]


@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize("sequences", [1, 7, 256])
def test_decode_is_affine_in_context(made: RooflineStepModel, sequences: int) -> None:
    base_s, slope_s = made.decode_terms(sequences)
    assert base_s > 0
    assert slope_s > 0
    for context in (0, 1000, 3_000_000):
        assert made.step_s(StepBatch(sequences, context, 0, 0.0)) == pytest.approx(
            base_s + slope_s * context, rel=1e-12
        )


@pytest.mark.parametrize("made", MODELS)
def test_more_work_takes_longer(made: RooflineStepModel) -> None:
    times = [made.decode_terms(count)[0] for count in (1, 2, 8, 64, 512)]
    assert times == sorted(times)
    prompts = [made.step_s(StepBatch(4, 4000, size, chunk_pairs(0, size), 1)) for size in (64, 512, 4096, 32768)]
    assert prompts == sorted(prompts)
    assert prompts[0] > made.step_s(StepBatch(4, 4000, 0, 0.0))


def test_numbers_and_arrays_agree() -> None:
    made = MODELS[1]
    sequences, tokens, chunks = np.array([3.0, 0.0, 40.0]), np.array([0.0, 500.0, 900.0]), np.array([0.0, 1.0, 3.0])
    together = made.base_s(sequences, tokens, tokens**2 / 2, chunks)
    apart = [made.base_s(*each) for each in zip(sequences, tokens, tokens**2 / 2, chunks, strict=True)]
    assert together == pytest.approx(apart, rel=1e-12)


def test_an_empty_step_takes_no_time() -> None:
    assert MODELS[0].step_s(StepBatch(0, 0, 0, 0.0)) == 0


def test_a_lone_decode_reads_the_weights_once() -> None:
    ideal = replace(
        model(how="bf16", tp=1),
        efficiencies=replace(
            Efficiencies(), weights=1.0, compute=1.0, layer_s=0.0, step_s=0.0, sequence_s=0.0, prefill_layer_s=0.0
        ),
    )
    weights = ideal.shape.dense_parameters + ideal.shape.head_parameters
    assert ideal.decode_terms(1)[0] == pytest.approx(2 * weights / 4.8e12, rel=0.001)


def test_a_large_prompt_is_bound_by_compute() -> None:
    made = model(tp=8, how="bf16")
    flops = made.shape.prefill_flops(8192)
    step_s = made.step_s(StepBatch(0, 0, 8192, chunk_pairs(0, 8192), 1))
    assert 0.3 < flops / (8 * 989e12) / step_s < made.efficiencies.compute


def test_latent_kv_is_read_by_every_rank() -> None:
    one, eight = (model("deepseek-v3", "h200", "fp8", tp=tp, ep=tp).context_token_s() for tp in (1, 8))
    grouped, split = (model(tp=tp).context_token_s() for tp in (1, 8))
    assert eight > one / 4
    assert split == pytest.approx(grouped / 8, rel=1e-6)


def test_few_tokens_touch_few_experts() -> None:
    made = model("deepseek-v3", "h200", "fp8", tp=8)
    first, many = made.decode_terms(1)[0], made.decode_terms(64)[0]
    dense = model("llama-3.1-70b", "h200", "fp8", tp=8)
    assert many / first > 2 * dense.decode_terms(64)[0] / dense.decode_terms(1)[0]


def test_what_memory_is_left_holds_kv() -> None:
    assert model(how="bf16", gpu="h100", tp=1).kv_capacity_tokens() == 0
    made = model(how="bf16", gpu="h100", tp=4)
    assert made.weight_bytes() == pytest.approx(141.1e9 / 4, rel=0.001)
    free = made.hardware.memory_bytes * 0.9 - made.weight_bytes() - 4e9
    assert made.kv_capacity_tokens() == int(free / (327_680 / 4))


def test_unknown_precisions_are_named() -> None:
    with pytest.raises(ConfigError, match="fp3"):
        model(how="fp3")
