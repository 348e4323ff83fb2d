"""The simulated engine divides its steps as the workers do: every step against policy/turns.py."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from twostroke.policy.turns import Prompt, divide
from twostroke.sim.engine import Engine
from twostroke.sim.gaps import Gaps
from twostroke.sim.limits import Limits, Listener
from twostroke.sim.sequence import Sequence, Stroke
from unit.sim.scenarios import PLAIN

BUDGET, BLOCK = 64, 16


@pytest.mark.parametrize("seed", range(200))
def test_every_step_is_divided_as_on_a_worker(seed: int) -> None:
    source = random.Random(seed)
    # Those with a chunk limit that get nothing keep others out on a worker; here they do not.
    places, blocks, limit = source.choice([(6, 24, 0), (6, 60, 0), (64, 1000, 24)])
    limits = Limits(PLAIN, blocks=blocks, block_tokens=BLOCK, budget_tokens=BUDGET, sequences=places)
    ends_s: list[float] = []
    engine = Engine(0, limits, Listener(), lambda at_s, *_: ends_s.append(at_s), Gaps(0.0), 1, shortest_first=True)
    prompts: dict[int, Prompt] = {}
    strokes: dict[int, Sequence] = {}
    held: list[Sequence] = []
    steps = 0
    expected: dict[int, int] = {}
    while steps < 600:
        # Those that come now are in the next step, or in this one where there is none.
        for _ in range(source.choice([0, 0, 1, 3]) if steps < 60 else 0):
            tokens = source.choice([1, 5, 20, source.randint(1, 300)])
            limited = limit if source.random() < 0.2 and tokens > limit else 0
            number = len(strokes)
            strokes[number] = Sequence(number, Stroke.PREFILL, tokens, 1, ())
            strokes[number].chunk_tokens = limited or tokens
            prompts[number] = Prompt(tokens, limited, blocks=-(-tokens // BLOCK))
            if not engine.busy:
                expected = {number: min(tokens, limited or BUDGET)}
            engine.enqueue(strokes[number], ends_s[-1] if ends_s else 0.0)
        if not engine.busy:
            assert not prompts or steps == 0
            steps += 1
            continue
        got = {sequence.request: tokens for sequence, tokens in engine._chunks}
        assert got == expected, f"step {steps}"
        steps += 1
        for number, tokens in got.items():
            prompts[number] = replace(prompts[number], left_tokens=prompts[number].left_tokens - tokens, blocks=None)
            if not prompts[number].left_tokens:
                del prompts[number]
                held.append(strokes[number])
        expected = _divided(prompts, places, engine.store.free)
        engine.step_end(ends_s[-1])
        while held:
            stroke, idle = held.pop(), not engine.busy
            if idle:
                expected = _divided(prompts, places, engine.store.free + -(-stroke.prompt_tokens // BLOCK))
            engine.release(stroke, ends_s[-1])
    assert not prompts, "all were computed"


def _divided(prompts: dict[int, Prompt], places: int, free_blocks: int) -> dict[int, int]:
    """What the next step gives to whom; prompts: oldest first."""
    by_age = list(prompts)
    runs = sum(each.blocks is None for each in prompts.values())
    shares = divide(list(prompts.values()), BUDGET, places - runs, free_blocks)
    return {by_age[index]: tokens for index, tokens in shares if tokens}
