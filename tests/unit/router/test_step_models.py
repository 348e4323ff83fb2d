"""What is predicted of workers' steps, before and after they were seen."""

from __future__ import annotations

import pytest

from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.policy.step_model import LinearStepModel, StepBatch, chunk_pairs
from twostroke.router.step_models import EAGER_STEPS, PAUSE_S, StepModels
from twostroke.v1.worker_pb2 import GetInfoResponse, StepCosts, WatchLoadResponse

PRIOR = StepCosts(const_s=0.01, per_sequence_s=0.001, per_prefill_token_s=0.0001)
TRUE = LinearStepModel(0.02, 0.002, 0.0, 0.0004)


def info(prior: StepCosts = PRIOR, epoch: str = "1") -> GetInfoResponse:
    return GetInfoResponse(epoch=epoch, prior_costs=prior)


def samples(count: int, sequences: int = 2, prompt: int = 0) -> WatchLoadResponse:
    load = WatchLoadResponse()
    for _ in range(count):
        batch = StepBatch(sequences, 0, prompt, chunk_pairs(0, prompt), int(prompt > 0))
        load.step_samples.add(
            sequences=sequences,
            prefill_tokens=prompt,
            prefill_pairs=batch.prefill_pairs,
            prefill_chunks=batch.prefill_chunks,
            duration_ms=TRUE.step_s(batch) * 1000,
        )
    return load


def met(*addresses: str) -> StepModels:
    models = StepModels()
    for address in addresses:
        models.meet(address, info())
    return models


def prompt_s(models: StepModels, address: str, tokens: int = 512) -> float:
    found = models.predicted(address)
    assert found is not None
    return found.step_s(StepBatch(0, 0, tokens, 0, 1))


def test_a_worker_is_what_it_says_until_it_was_seen() -> None:
    models = met("a")
    assert models.predicted("a") == LinearStepModel(0.01, 0.001, 0.0, 0.0001)
    assert models.predicted("b") is None
    assert models.put_into(WorkerSnapshot("b", True, False)) == WorkerSnapshot("b", True, False)
    assert not models.sure("a")


def test_steps_are_learned_and_change_the_snapshot() -> None:
    models = met("a")
    assert models.learn("a", samples(8), 0.0) == {"a"}
    assert models.learn("a", samples(8, 0, 512), 0.1) == {"a"}
    made = models.put_into(WorkerSnapshot("a", True, True))
    assert made.step_model.step_s(StepBatch(2, 0, 0, 0)) == pytest.approx(0.024, rel=0.05)
    assert made.prefill_token_s == pytest.approx((0.02 + 512 * 0.0004) / 512, rel=0.1)
    assert models.sure("a")
    assert models.learn("a", WatchLoadResponse(), 0.2) == ()
    assert models.learn("nobody", samples(1), 0.2) == ()


def test_workers_that_expect_the_same_learn_of_each_other_what_they_do_not_see() -> None:
    models = met("p", "d")
    models.meet("other", info(StepCosts(const_s=1.0, per_prefill_token_s=0.5)))
    assert models.learn("d", samples(8), 0.0) == {"d", "p"}
    before_s = prompt_s(models, "d")
    assert models.learn("p", samples(8, 0, 512), 0.0) == {"p", "d"}
    assert before_s < 0.08
    assert prompt_s(models, "d") == pytest.approx(0.02 + 512 * 0.0004, rel=0.1)
    answers = models.predicted("p")
    assert answers is not None
    assert answers.step_s(StepBatch(2, 0, 0, 0)) == pytest.approx(0.024, rel=0.05)
    assert prompt_s(models, "p") == pytest.approx(0.02 + 512 * 0.0004, rel=0.1)
    assert prompt_s(models, "other") == 1.0 + 512 * 0.5


def test_the_last_tokens_of_a_handed_over_prompt_teach_nothing_of_prompts() -> None:
    models, load = met("d"), samples(8)
    for sample in load.step_samples:
        sample.prefill_tokens = sample.prefill_chunks = 1
        sample.duration_ms = 100
    models.learn("d", load, 0.0)
    assert models.predicted("d") == LinearStepModel(0.01, 0.001, 0.0, 0.0001)


def test_a_worker_that_is_known_is_learned_from_now_and_then() -> None:
    models, now_s = met("a"), 0.0
    while models.all()["a"].steps < EAGER_STEPS:
        assert models.learn("a", samples(16), now_s) == {"a"}
    assert models.learn("a", samples(16), now_s + PAUSE_S / 2) == ()
    assert models.learn("a", samples(16), now_s + PAUSE_S) == {"a"}


def test_a_restart_changes_nothing_and_another_machine_everything() -> None:
    models = met("a")
    models.learn("a", samples(16), 0.0)
    learned = models.predicted("a")
    models.meet("a", info(epoch="2"))
    assert models.predicted("a") == learned
    models.meet("a", info(StepCosts(const_s=5.0)))
    assert models.predicted("a") == LinearStepModel(5.0, 0.0, 0.0, 0.0)
    models.meet("b", info())
    assert models.predicted("b") == LinearStepModel(0.01, 0.001, 0.0, 0.0001), "its teacher is gone"


def test_what_spare_cores_leave_is_in_the_snapshot_of_who_used_them_and_of_who_may() -> None:
    models = met("p", "d")
    load = samples(8, 0, 512)
    for sample in load.step_samples:
        sample.spared_ms = 0.4 * sample.duration_ms
    models.learn("p", load, 0.0)
    for address in ("p", "d"):
        assert models.put_into(WorkerSnapshot(address, True, True)).spare_share == pytest.approx(0.6)
