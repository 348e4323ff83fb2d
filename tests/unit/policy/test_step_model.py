"""The shared form of step times."""

import pytest

from twostroke.policy.step_model import LinearStepModel, StepBatch, chunk_pairs, decode_run_s

MODEL = LinearStepModel(0.01, 1e-4, 3e-8, 6e-5, 2e-9, 1e-3)


def test_a_decode_step_is_what_its_terms_say() -> None:
    base_s, slope_s = MODEL.decode_terms(8)
    assert base_s == pytest.approx(0.0108)
    assert MODEL.step_s(StepBatch(8, 20_000, 0, 0.0)) == base_s + slope_s * 20_000


def test_prefill_adds_tokens_pairs_and_chunks() -> None:
    alone_s = MODEL.step_s(StepBatch(0, 0, 100, chunk_pairs(50, 100), 2))
    assert alone_s == pytest.approx(0.01 + 100 * 6e-5 + 10_000 * 2e-9 + 2e-3)


def test_an_empty_step_takes_no_time() -> None:
    assert MODEL.step_s(StepBatch(0, 0, 0, 0.0)) == 0


def test_chunks_of_a_prompt_add_up_to_the_whole() -> None:
    assert chunk_pairs(0, 700) + chunk_pairs(700, 324) == chunk_pairs(0, 1024) == 1024 * 512


def test_a_run_of_steps_has_a_closed_form() -> None:
    context, by_steps_s = 5000, 0.0
    for _ in range(37):
        by_steps_s += MODEL.step_s(StepBatch(3, context, 0, 0.0))
        context += 3
    assert decode_run_s(MODEL, 3, 5000, 37) == pytest.approx(by_steps_s, rel=1e-12)
