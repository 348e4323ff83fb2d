import random
from collections.abc import Callable

import pytest

from twostroke.policy.perf_model import PERSISTENT, WARM_UP, WorkerModel
from twostroke.policy.step_model import LinearStepModel, StepBatch, chunk_pairs

PRIOR = LinearStepModel(0.02, 2e-4, 1e-7, 2e-4, 1e-8)

TRUTHS = {
    "near the prior": LinearStepModel(0.03, 1e-4, 2e-7, 3e-4, 5e-9, 1e-3),
    "a slow machine": LinearStepModel(0.05, 2e-3, 2e-6, 3e-3, 1e-6),
    "a fast machine": LinearStepModel(0.002, 2e-5, 1e-8, 1e-5, 1e-9),
    "no cost per sequence": LinearStepModel(0.02, 0.0, 1e-7, 2e-4, 0.0),
}


def a_batch(rng: random.Random) -> StepBatch:
    sequences = rng.randrange(64)
    context = sum(rng.randrange(100, 4000) for _ in range(sequences))
    if sequences and rng.random() < 0.7:
        return StepBatch(sequences, context, 0, 0)
    chunk = rng.randrange(16, 512)
    return StepBatch(sequences, context, chunk, chunk_pairs(rng.randrange(6000), chunk), 1)


def feed(
    model: WorkerModel, truth: LinearStepModel, steps: int, rng: random.Random, absurd: float = 0.0, noise: float = 0.05
) -> None:
    for _ in range(steps):
        batch = a_batch(rng)
        step_s = truth.step_s(batch) * rng.lognormvariate(0, noise)
        if rng.random() < absurd:
            step_s *= rng.choice((0.05, 10.0, 100.0))
        model.observe(batch, step_s)


def errors(model: WorkerModel, truth: LinearStepModel, rng: random.Random) -> list[float]:
    batches = [a_batch(rng) for _ in range(200)]
    return sorted(abs(model.model.step_s(batch) / truth.step_s(batch) - 1) for batch in batches)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRUTHS)
def test_it_learns_whatever_the_prior_and_in_spite_of_absurd_steps(name: str, seed: int) -> None:
    rng, truth, model = random.Random(seed), TRUTHS[name], WorkerModel(PRIOR)
    feed(model, truth, 40, rng, absurd=0.03)
    assert errors(model, truth, rng)[100] < 0.2, "useful after a second of work"
    feed(model, truth, 560, rng, absurd=0.03)
    found = errors(model, truth, rng)
    assert found[100] < 0.05
    assert found[190] < 0.35
    assert model.error is not None
    assert model.error < 0.1
    assert 5 <= model.set_aside <= 40, "about 18 of 600 were absurd"
    assert model.steps + model.set_aside == 600


def test_before_the_first_step_it_is_the_prior() -> None:
    model = WorkerModel(PRIOR)
    assert model.model == PRIOR
    assert (model.error, model.steps) == (None, 0)
    assert model.prefill_token_s == pytest.approx((0.02 + 512 * 2e-4 + 512 * 256 * 1e-8) / 512)
    assert not model.observe(StepBatch(0, 0, 0, 0), 0.1), "an empty batch teaches nothing"
    assert not model.observe(StepBatch(1, 10, 0, 0), 0.0)
    assert model.model == PRIOR


def test_a_prior_that_knows_nothing_is_enough() -> None:
    rng, truth = random.Random(7), TRUTHS["near the prior"]
    model = WorkerModel(LinearStepModel(0.0, 0.0, 0.0, 0.0))
    feed(model, truth, 500, rng)
    assert errors(model, truth, rng)[100] < 0.1


def test_no_term_becomes_negative() -> None:
    """Of a truth without two of the terms, with much noise, least squares alone would put them below 0."""
    for seed in range(5):
        rng, model = random.Random(seed), WorkerModel(PRIOR)
        for _ in range(300):
            feed(model, LinearStepModel(0.02, 0.0, 0.0, 2e-4), 1, rng, noise=0.2)
            made = model.model
            assert min(made.const_s, made.per_sequence_s, made.per_context_token_s) >= 0
            assert min(made.per_prefill_token_s, made.per_prefill_pair_s, made.per_prefill_chunk_s) >= 0


def test_one_absurd_step_moves_nothing_and_staying_absurd_is_believed() -> None:
    rng, truth, model = random.Random(4), TRUTHS["near the prior"], WorkerModel(PRIOR)
    feed(model, truth, 200, rng)
    before, batch = model.model, StepBatch(20, 40_000, 0, 0)
    assert not model.observe(batch, 50 * truth.step_s(batch))
    assert model.model == before
    assert model.set_aside == 1

    slow = LinearStepModel(0.3, 1e-3, 2e-6, 3e-3, 5e-8, 1e-2)
    feed(model, slow, 20 * (PERSISTENT + WARM_UP), rng)
    assert errors(model, slow, rng)[100] < 0.05, "a worker that became ten times slower is known as such"
    assert model.set_aside <= 1 + 2 * PERSISTENT


def test_absurd_prompts_are_found_among_ordinary_answers() -> None:
    """A prefill that became slow while decode did not: its steps never come in a row."""
    rng, truth, model = random.Random(5), TRUTHS["near the prior"], WorkerModel(PRIOR)
    feed(model, truth, 200, rng)
    slow = LinearStepModel(0.03, 1e-4, 2e-7, 3e-3, 5e-8, 1e-3)
    feed(model, slow, 300, rng)
    assert errors(model, slow, rng)[100] < 0.05


def follow(model: WorkerModel, truth: Callable[[int], float], steps: int) -> list[float]:
    found = []
    for step in range(steps):
        batch = StepBatch(10 + step % 7, 20_000 + 100 * (step % 13), 0, 0)
        model.observe(batch, truth(step) * TRUTHS["near the prior"].step_s(batch))
        found.append(model.model.step_s(batch) / TRUTHS["near the prior"].step_s(batch))
    return found


def test_it_follows_a_drift_and_long_silence_on_prompts_does_not_blow_up() -> None:
    model = WorkerModel(PRIOR)
    feed(model, TRUTHS["near the prior"], 200, random.Random(6))
    prompt = StepBatch(0, 0, 256, chunk_pairs(0, 256), 1)
    known = model.model.step_s(prompt)
    found = follow(model, lambda step: min(2.0, 1 + step / 2000), 4000)
    assert found[-1] == pytest.approx(2.0, rel=0.03)
    assert model.model.step_s(prompt) == pytest.approx(known, rel=0.6), "what no step tells about stays as it was"


def test_what_spare_cores_leave_of_a_step_is_learned_from_steps_that_used_them() -> None:
    model, full, small = WorkerModel(PRIOR), StepBatch(0, 0, 512, 1e5, 1), StepBatch(0, 0, 40, 800, 1)
    assert model.spare_share == 1.0
    model.observe(full, 1.0)
    model.observe(small, 1.0, 0.5)
    model.observe(full, 1.0, 0.05)
    assert model.spare_share == 1.0, "none, of a step that uses none, next to none"
    model.observe(full, 1.0, 0.4)
    assert model.spare_share == pytest.approx(0.6), "at once"
    for _ in range(30):
        model.observe(full, 1.0, 0.5)
        model.observe(full, 1.0)
    assert model.spare_share == pytest.approx(0.5, abs=0.01), "whatever steps without them take"
