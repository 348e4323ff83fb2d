"""Closed loops over a prefill and a decode pool."""

import pytest

from twostroke.policy.step_model import LinearStepModel, StepBatch, chunk_pairs
from twostroke.sim.perf.two_pools import Pools, closed_loop

MODEL = LinearStepModel(0.01, 1e-4, 3e-8, 6e-5)


def pools(prefill: int = 1, decode: int = 1, batch: int = 64, budget: int = 8192, transfer_s: float = 0.0) -> Pools:
    return Pools(MODEL, prefill, budget, MODEL, decode, batch, lambda _: transfer_s)


def test_one_user_meets_nobody() -> None:
    ttft_s, tpot_s = closed_loop(pools(), [(1000, 11)] * 5, 1)
    prefill_s = MODEL.step_s(StepBatch(0, 0, 1000, chunk_pairs(0, 1000), 1))
    steps_s = sum(MODEL.step_s(StepBatch(1, 1001 + step, 0, 0.0)) for step in range(10)) / 10
    assert ttft_s == pytest.approx([prefill_s] * 5)
    assert tpot_s == pytest.approx([steps_s] * 5)


def test_a_transfer_is_a_gap_and_not_a_wait() -> None:
    near, far = (closed_loop(pools(transfer_s=time_s), [(1000, 11)] * 5, 1) for time_s in (0.0, 1.0))
    assert far[0] == pytest.approx(near[0])
    assert far[1] == pytest.approx([each + 0.1 for each in near[1]])


def test_prompts_that_come_together_share_a_step() -> None:
    ttft_s, _ = closed_loop(pools(), [(1000, 2)] * 4, 4)
    # The first is alone, as it finds the worker idle; the other three wait for it and go together.
    alone_s, three_s = (MODEL.step_s(StepBatch(0, 0, count * 1000, 0.0, count)) for count in (1, 3))
    assert ttft_s == pytest.approx([alone_s] + [alone_s + three_s] * 3)


def test_a_full_decode_pool_makes_answers_wait() -> None:
    wide, narrow = (closed_loop(pools(batch=batch), [(100, 50)] * 40, 8)[1] for batch in (8, 2))
    assert sum(narrow) > 2 * sum(wide)


def test_more_workers_mean_smaller_batches() -> None:
    one, four = (closed_loop(pools(4, decode), [(100, 200)] * 64, 32)[1] for decode in (1, 4))
    assert sum(four) < sum(one)


def test_every_request_ends() -> None:
    lengths = [(100 + 37 * index % 900, 2 + index % 50) for index in range(300)]
    ttft_s, tpot_s = closed_loop(pools(2, 3, 5), lengths, 17)
    assert min(ttft_s) > 0
    assert min(tpot_s) > 0.01
    assert len(ttft_s) == len(tpot_s) == 300
