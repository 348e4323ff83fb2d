"""From measured steps to a step model."""

import pytest

from twostroke.errors import ConfigError
from twostroke.policy.step_model import LinearStepModel, StepBatch, chunk_pairs
from twostroke.sim.fit import Sample, fit

TRUTH = LinearStepModel(0.02, 1e-3, 2e-6, 1e-3, 2e-7, 0.0)


def samples(slower: float = 1.0) -> list[Sample]:
    found = []
    for tokens in (16, 64, 512, 2048):
        pairs = chunk_pairs(0, tokens)
        seconds = TRUTH.step_s(StepBatch(0, 0, tokens, pairs, 1))
        found.append(Sample(seconds * slower, 1, prefill_tokens=tokens, prefill_pairs=pairs, prefill_chunks=1))
    for answers in (1, 4, 16):
        for context in (32, 256):
            seconds = TRUTH.step_s(StepBatch(answers, answers * context, 0, 0.0, 0))
            found.append(Sample(seconds * slower, 1, sequences=answers, context_tokens=answers * context))
    return found


@pytest.mark.parametrize("passes", [[1.0], [1.0, 1.4, 1.0], [1.6, 1.0, 1.0]])
def test_a_pass_on_a_slow_machine_counts_for_nothing(passes: list[float]) -> None:
    found = fit([sample for slower in passes for sample in samples(slower)])
    for batch in (StepBatch(4, 4000, 0, 0.0, 0), StepBatch(0, 0, 1024, chunk_pairs(0, 1024), 1)):
        assert found.model.step_s(batch) == pytest.approx(TRUTH.step_s(batch), rel=1e-3)
    assert found.median_error == pytest.approx(0, abs=1e-3)
    assert (found.residual_s > 1e-3) == (len(passes) > 1), "that the machine was slow is part of the error"


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 measured steps are too few"):
        fit(samples()[:5])
