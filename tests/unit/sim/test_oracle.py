"""The engine against sixty lines that do the same in the most obvious way."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from twostroke.policy.step_model import StepBatch, StepModel
from twostroke.sim.fleet import BOTH
from unit.sim.scenarios import MODEL, fleet, kind, run, traffic

BUDGET, SEQUENCES = 256, 6


@dataclass
class Request:
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    tokens_s: list[float] = field(default_factory=list)


def obvious(model: StepModel, requests: list[Request]) -> None:
    """Vllm's way: answers first, then chunks of prompts in order, until the budget is used."""
    waiting = sorted(requests, key=lambda each: each.arrival_s)
    running: list[Request] = []
    now_s = 0.0
    while waiting or running:
        if not running and waiting[0].arrival_s > now_s:
            now_s = waiting[0].arrival_s
        answers = [each for each in running if each.computed == each.prompt]
        budget = BUDGET - len(answers)
        chunks: list[tuple[Request, int]] = []
        for each in running:
            if each.computed < each.prompt and budget:
                chunks.append((each, min(budget, each.prompt - each.computed)))
                budget -= chunks[-1][1]
        while waiting and waiting[0].arrival_s <= now_s and budget and len(running) < SEQUENCES:
            each = waiting.pop(0)
            running.append(each)
            chunks.append((each, min(budget, each.prompt)))
            budget -= chunks[-1][1]
        now_s += model.step_s(
            StepBatch(
                len(answers),
                sum(each.prompt + len(each.tokens_s) for each in answers),
                sum(new for _, new in chunks),
                sum(new * (2 * each.computed + new) / 2 for each, new in chunks),
                len(chunks),
            )
        )
        for each, new in chunks:
            each.computed += new
        for each in answers + [each for each, _ in chunks if each.computed == each.prompt]:
            each.tokens_s.append(now_s)
        running = [each for each in running if len(each.tokens_s) < each.output]


@pytest.mark.parametrize("seed", range(30))
def test_the_engine_does_the_obvious(seed: int) -> None:
    source = random.Random(seed)
    rows, at_s = [], 0.0
    for _ in range(40):
        at_s += source.expovariate(6)
        rows.append((at_s, source.randint(1, 900), source.randint(1, 60)))
    expected = [Request(at_s - rows[0][0], prompt, output) for at_s, prompt, output in rows]
    obvious(MODEL, expected)
    one = kind(MODEL, budget_tokens=BUDGET, sequences=SEQUENCES, blocks=100_000)
    cluster, _ = run(fleet((one, BOTH, 1), hop_s=0.0), traffic(rows))
    records = cluster.records
    for request, each in enumerate(expected):
        assert records.first_s[request] == pytest.approx(each.tokens_s[0], abs=1e-6)
        assert records.end_s[request] == pytest.approx(each.tokens_s[-1], abs=1e-6)
    gaps = sorted(b - a for each in expected for a, b in zip(each.tokens_s, each.tokens_s[1:], strict=False))
    sizes, counts = records.gaps.bins()
    assert counts.sum() == len(gaps)
    assert records.gaps.largest_s == pytest.approx(gaps[-1], abs=1e-6)
    assert float((sizes * counts).sum()) == pytest.approx(sum(gaps), rel=1e-3)
