"""Closed loops, against a twin that goes step by step."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest

from twostroke.policy.step_model import LinearStepModel, StepBatch, StepModel, chunk_pairs
from twostroke.sim.perf.closed_loop import Schedule, schedule
from twostroke.sim.perf.load import Scheduler, Workload

MODEL = LinearStepModel(0.01, 1e-4, 3e-8, 6e-5, 2e-9)
ROOMY = 10**9


def times(made: Schedule) -> tuple[np.ndarray, np.ndarray, float]:
    base_s = np.array(
        [
            MODEL.step_s(StepBatch(int(b), 0, int(m), pairs, int(chunks)))
            for b, m, pairs, chunks in zip(
                made.sequences, made.prefill_tokens, made.prefill_pairs, made.prefill_chunks, strict=True
            )
        ]
    )
    ttft_s, tpot_s, end_s = made.times(base_s, MODEL.per_context_token_s)
    return ttft_s, tpot_s, float(end_s)


def twin(work: Workload, budget: int, model: StepModel, late: int) -> tuple[list[float], list[float]]:
    """Chunked, mixed, without limits: one step at a time."""
    lengths = work.lengths()
    sent, first, last = ([0.0] * len(lengths) for _ in range(3))
    coming = [(0, index) for index in range(work.concurrency)]
    following = work.concurrency
    queue: deque[list[int]] = deque()
    running: dict[int, int] = {}
    now_s, step = 0.0, 0
    while coming or queue or running:
        if not queue and not running:
            step = max(step, coming[0][0])
        while coming and coming[0][0] <= step:
            _, index = coming.pop(0)
            queue.append([index, 0])
        decodes, context = len(running), sum(lengths[i][0] + done for i, done in running.items())
        left, tokens, pairs, chunks, firsts = budget - decodes, 0, 0.0, 0, []
        while queue and left > 0:
            index, done = queue[0]
            size = min(left, lengths[index][0] - done)
            pairs += chunk_pairs(done, size)
            tokens, left, chunks = tokens + size, left - size, chunks + 1
            queue[0][1] += size
            if queue[0][1] < lengths[index][0]:
                break
            firsts.append(index)
            queue.popleft()
        now_s += model.step_s(StepBatch(decodes, context, tokens, pairs, chunks))
        step += 1
        for index in list(running):
            running[index] += 1
            if running[index] == lengths[index][1]:
                del running[index]
                last[index] = now_s
                if following < len(lengths):
                    sent[following] = now_s
                    coming.append((step + late, following))
                    following += 1
        for index in firsts:
            first[index] = now_s
            running[index] = 1
    ttft = [a - b for a, b in zip(first, sent, strict=True)]
    return ttft, [(b - a) / (o - 1) for a, b, (_, o) in zip(first, last, lengths, strict=True)]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    "work", [Workload(5, 700, 60, 0.5, 6), Workload(12, 300, 20, 1.0, 4), Workload(1, 50, 2, 1, 3)]
)
def test_the_schedule_is_what_the_steps_give(work: Workload, late: int) -> None:
    made = schedule(work, Scheduler(budget_tokens=512, late_steps=late), ROOMY)
    ttft_s, tpot_s, _ = times(made)
    slow_ttft_s, slow_tpot_s = twin(work, 512, MODEL, late)
    order = np.argsort(made.arrived, kind="stable")  # requests that come together may be numbered either way
    assert np.sort(ttft_s) == pytest.approx(np.sort(slow_ttft_s), rel=1e-9)
    assert np.sort(tpot_s) == pytest.approx(np.sort(slow_tpot_s), rel=1e-9)
    assert len(order) == work.concurrency * work.rounds


RULES = [
    Scheduler(),
    Scheduler(budget_tokens=300),
    Scheduler(exclusive=True, reserve_output=True),
    Scheduler(chunked=False, reserve_output=True),
    Scheduler(poll_steps=10, exclusive=True),
    Scheduler(hold_steps=8, hold_tokens=2000, chunked=False),
    Scheduler(max_sequences=3),
]


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("capacity", [ROOMY, 4000])
def test_every_token_is_computed_once(rules: Scheduler, capacity: int) -> None:
    work = Workload(8, 900, 50, 0.6, 5)
    made = schedule(work, rules, capacity)
    prompts = sum(prompt for prompt, _ in work.lengths())
    answers = sum(output - 1 for _, output in work.lengths())
    assert (made.steps * made.sequences).sum() >= answers
    computed = (made.steps * made.prefill_tokens).sum()
    assert computed == prompts if rules.reserve_output or capacity == ROOMY else computed >= prompts
    assert (made.first > made.arrived).all()
    assert (made.last > made.first).all()
    assert made.sequences.max() <= min(rules.max_sequences, work.concurrency)
    if rules.reserve_output:
        assert (made.steps * made.sequences).sum() == answers
        assert made.context.max() <= capacity


def test_a_prompt_step_has_no_decodes_where_they_exclude_each_other() -> None:
    made = schedule(Workload(4, 500, 30, 0.7, 5), Scheduler(exclusive=True), ROOMY)
    assert not ((made.prefill_tokens > 0) & (made.sequences > 0)).any()


def test_memory_makes_requests_wait() -> None:
    work = Workload(16, 1000, 100, 1.0, 4)
    free, tight = (schedule(work, Scheduler(reserve_output=True), capacity) for capacity in (ROOMY, 4400))
    assert tight.sequences.max() == 4
    assert times(tight)[0].mean() > 4 * times(free)[0].mean()
    assert times(tight)[1].mean() < times(free)[1].mean()


def test_a_put_back_request_finishes() -> None:
    made = schedule(Workload(6, 500, 400, 1.0, 2), Scheduler(), 4000)
    assert (made.steps * made.prefill_tokens).sum() > 6 * 2 * 500
    assert (made.last > made.first).all()


def test_prompts_wait_for_company() -> None:
    work = Workload(4, 1000, 64, 0.5, 6)
    rules = Scheduler(chunked=False, hold_steps=20, hold_tokens=8000)
    assert (
        times(schedule(work, rules, ROOMY))[0].mean()
        > times(schedule(work, replace(rules, hold_steps=0), ROOMY))[0].mean()
    )


def test_users_may_come_one_after_the_other() -> None:
    together, ramped = (schedule(Workload(32, 2000, 100, 0.8, 3, ramp), Scheduler(), ROOMY) for ramp in (0, 1))
    assert times(ramped)[0].mean() < times(together)[0].mean()


def test_variants_of_a_model_go_together() -> None:
    made = schedule(Workload(3, 100, 10, 0.8, 4), Scheduler(), ROOMY)
    base_s = np.stack([made.sequences * 1e-3 + 0.01, made.sequences * 2e-3 + 0.01])
    slope_s = np.array([[1e-8], [2e-8]])
    both = made.times(base_s, slope_s)
    second = made.times(base_s[1], 2e-8)
    assert both[0].shape == (2, 12)
    assert both[1][1] == pytest.approx(second[1])
