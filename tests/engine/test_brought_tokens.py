"""A first token that comes with the KV ends the prompt of a request that needs no more of it than its id."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.scheduler_rig import BLOCK, Family, prompt

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's imports warn of is not ours
]


def test_the_step_after_the_arrival_chooses_the_second_token(family: Callable[..., Family]) -> None:
    d = family()
    d.fetch("a", prompt(40), max_tokens=3, appends=True)
    d.step()
    d.ended("a")
    planned, computed = d.plan()
    assert computed == {"a": 1}
    (new,) = planned.scheduled_new_reqs
    assert (new.prompt_token_ids, new.num_computed_tokens) == ([*prompt(40), 7], 40), "the token that came is computed"
    assert new.sampling_params.max_tokens == 2
    d.end(planned)
    assert d.step() == {"a": 1}
    assert "a" not in d.scheduler.requests, "three tokens: one came, two were chosen"
    assert d.in_use() == 0


def test_one_that_must_take_the_step_again_computes_the_last_token_of_its_prompt(
    family: Callable[..., Family],
) -> None:
    d = family()
    d.fetch("a", prompt(40), max_tokens=3)
    d.step()
    d.ended("a")
    (new,) = d.scheduler.schedule().scheduled_new_reqs
    assert (new.prompt_token_ids, new.num_computed_tokens, new.sampling_params.max_tokens) == (prompt(40), 39, 3)


@pytest.mark.parametrize(("tokens", "blocks"), [(2 * BLOCK - 1, 2), (2 * BLOCK, 3)])
def test_a_token_that_fills_a_block_or_begins_one_is_as_any_other(
    family: Callable[..., Family], tokens: int, blocks: int
) -> None:
    d = family()
    d.fetch("a", prompt(tokens), appends=True)
    d.step()
    assert d.in_use() == 2
    d.ended("a")
    assert d.step() == {"a": 1}
    assert d.in_use() == blocks


def test_what_is_missing_is_computed_together_with_it(family: Callable[..., Family]) -> None:
    """O-02, with the token as the last of the prompt."""
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("a", prompt(96), max_tokens=3, appends=True)
    d.step()
    blocks = d.rank_heard(notes.Begin).block_ids
    d.ended("a", "lost on the way", (blocks[5],))
    assert d.step() == {"a": BLOCK + 1}
    while "a" in d.scheduler.requests:
        d.step()
    assert d.in_use() == 0
