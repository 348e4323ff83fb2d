"""How an engine keeps its steps as short as they are to be."""

from __future__ import annotations

from twostroke.engine.vllm.pace import Pace
from twostroke.policy.step_model import LinearStepModel, StepBatch, chunk_pairs
from twostroke.policy.turns import LEAST_ROOM

TRUTH = LinearStepModel(0.03, 4e-3, 2e-6, 4e-3, 8e-7)


def seen(spare: float = 1.0) -> Pace:
    """One that saw prompts of 2,048 tokens; spare: share of a step's time that is left with spare cores."""
    pace = Pace()
    for _ in range(4):
        for computed in range(0, 2048, 512):
            batch = StepBatch(0, 0, 512, chunk_pairs(computed, 512), 1)
            pace.observe(batch, TRUTH.step_s(batch), spare * TRUTH.step_s(batch))
        short = StepBatch(0, 0, 60, chunk_pairs(0, 60), 1)
        pace.observe(short, TRUTH.step_s(short), spare * TRUTH.step_s(short))
        answers = StepBatch(4, 4000, 0, 0.0, 0)
        pace.observe(answers, TRUTH.step_s(answers), TRUTH.step_s(answers))
    return pace


def test_steps_take_as_long_as_they_are_to_and_no_longer() -> None:
    pace = seen()
    for depth in (0, 1000, 4000):
        room = pace.room(1.0, 512, 2, 2000, depth)
        took_s = TRUTH.batch_s(2, 2000, room, chunk_pairs(depth, room))
        assert 0.7 < took_s < (1.1 if depth < 2048 else 1.4), depth
    assert pace.room(9.0, 512, 2, 2000, 1000) == 512
    assert pace.room(0.01, 512, 2, 2000, 1000) == LEAST_ROOM, "a prompt goes on, however slowly"


def test_nothing_is_bounded_before_steps_are_known() -> None:
    assert Pace().room(1e-6, 512, 2, 2000, 1000) == 512


def test_with_spare_cores_a_step_holds_more() -> None:
    assert 1.6 < seen(0.5).room(1.0, 512, 0, 0, 1000) / seen().room(1.0, 512, 0, 0, 1000) < 2.5
