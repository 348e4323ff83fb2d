import pytest

from twostroke.policy.prior import SHEETS, ModelCosts, accelerators, cpu, prior
from twostroke.policy.step_model import StepBatch, chunk_pairs
from twostroke.sim.perf import hardware

# 30 layers, 9 heads, 3 of KV, of 64; 106 M parameters in the layers, 28 M in the head; float32.
SMOLLM2_135M = ModelCosts(538e6, 2 * 106.2e6, 2 * 28.3e6, 4 * 30 * 9 * 64, 2 * 30 * 3 * 64 * 4)
LLAMA_8B = ModelCosts(16e9, 2 * 7e9, 2 * 0.53e9, 4 * 32 * 32 * 128, 2 * 32 * 8 * 128 * 2)


def prompt_s(tokens: int, chunk: int) -> float:
    model = prior(SMOLLM2_135M, cpu(1))
    return sum(model.step_s(StepBatch(0, 0, chunk, chunk_pairs(begin, chunk), 1)) for begin in range(0, tokens, chunk))


def test_one_core_is_guessed_within_a_factor_of_what_was_measured() -> None:
    """Measured on one core: 64 and 93 ms a step with 1 and 8 answers, 236 prompt tokens/s at 512, 132 at 4096."""
    model = prior(SMOLLM2_135M, cpu(1))
    assert model.step_s(StepBatch(1, 100, 0, 0)) == pytest.approx(0.064, rel=0.3)
    assert model.step_s(StepBatch(8, 800, 0, 0)) == pytest.approx(0.093, rel=0.4)
    assert 512 / prompt_s(512, 512) == pytest.approx(236, rel=0.4)
    assert 4096 / prompt_s(4096, 512) == pytest.approx(132, rel=0.4)


def test_accelerators_are_known_by_what_the_driver_calls_them() -> None:
    h100 = accelerators("NVIDIA H100 80GB HBM3", 1)
    assert prior(LLAMA_8B, h100).step_s(StepBatch(1, 1000, 0, 0)) == pytest.approx(0.010, rel=0.3)
    both = accelerators("NVIDIA H100 80GB HBM3", 2)
    assert (both.flops_per_s, both.bytes_per_s) == (2 * h100.flops_per_s, 2 * h100.bytes_per_s)
    assert accelerators("AMD Instinct MI300X", 1).bytes_per_s > accelerators("NVIDIA H200", 1).bytes_per_s
    assert accelerators("Some New Thing 9000", 1) == accelerators("NVIDIA L40S", 1)


@pytest.mark.parametrize("name", SHEETS)
def test_the_sheets_are_those_of_the_simulator(name: str) -> None:
    sheet = hardware.find(name)
    assert SHEETS[name] == pytest.approx((sheet.bf16_flops, sheet.memory_bytes_per_s))
