"""How our scheduler divides vLLM's steps among prompts, and what it tells of them; in this process, as in
test_handoff_scheduler.py. A step has 64 tokens, the pool 23 blocks of 16."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.scheduler_rig import BLOCK, Family, prompt
from twostroke.policy.block_hash import KvIdentity, block_hashes
from twostroke.policy.kv_journal import KvJournal
from twostroke.policy.prefix_index import PrefixIndex
from twostroke.policy.step_model import StepBatch, chunk_pairs

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's imports warn of is not ours
]

both = pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])


@both
def test_a_short_prompt_is_in_the_next_step_and_the_long_one_has_a_part_of_that(
    family: Callable[..., Family], ahead: bool
) -> None:
    e = family(ahead=ahead)
    e.add("long", prompt(200), 1)
    assert e.step() == {"long": 64}
    e.add("short", prompt(12, 500), 1)
    assert e.step() == {"long": 16, "short": 12}
    assert e.step() == {"long": 64}
    assert e.step() == {"long": 56}
    assert not e.scheduler.has_unfinished_requests()


def test_steps_that_are_scheduled_ahead_are_shared_as_well(family: Callable[..., Family]) -> None:
    e = family(ahead=True)
    e.add("long", prompt(200), 1)
    first, _ = e.plan()
    e.add("short", prompt(12, 500), 4)
    second, shares = e.plan()
    assert shares == {"long": 16, "short": 12}
    e.end(first)
    third, shares = e.plan()
    assert shares == {"long": 63, "short": 1}, "the answer first"
    e.end(second)
    e.end(third)


def test_many_short_prompts_cannot_hold_up_the_long_one(family: Callable[..., Family]) -> None:
    e = family()
    e.add("long", prompt(160), 1)
    left = 160
    for number in range(10):
        e.add(f"{number}", prompt(60, 1000 * (number + 1)), 1)
        tokens = e.step()["long"]
        assert tokens >= min(16, left), "its part for certain"
        left -= tokens
        if not left:
            return
    raise AssertionError("the long one waits")


@both
def test_no_step_computes_more_of_a_prompt_than_was_allowed(family: Callable[..., Family], ahead: bool) -> None:
    e = family(ahead=ahead)
    e.add("lent", prompt(60), 1, chunk_tokens=24)
    e.add("other", prompt(100, 500), 1)
    assert e.step() == {"lent": 24, "other": 40}
    assert e.step() == {"lent": 24, "other": 40}
    assert e.step() == {"lent": 12, "other": 20}
    e.add("alone", prompt(60, 900), 1, chunk_tokens=24)
    assert [e.step()["alone"] for _ in range(3)] == [24, 24, 12]


def test_answers_go_first_and_prompts_share_the_rest(family: Callable[..., Family]) -> None:
    e = family()
    for name, first in (("a", 0), ("b", 500)):
        e.add(name, prompt(10, first), 20)
    e.step()
    e.add("long", prompt(150, 900), 1)
    e.add("short", prompt(9, 2000), 1)
    assert e.step() == {"a": 1, "b": 1, "long": 16, "short": 9}


def test_what_cannot_be_let_in_takes_nothing_from_those_that_run(family: Callable[..., Family]) -> None:
    """Neither does what comes after it get in before it."""
    e = family()
    e.offer("held", prompt(240), 1)
    while e.scheduler.has_unfinished_requests():
        e.step()
    assert e.in_use() == 15
    e.add("runs", prompt(100, 500), 1)
    e.step()
    e.add("big", prompt(120, 1000), 1)
    e.add("small", prompt(40, 2000), 1)
    assert e.step() == {"runs": 36}
    e.add("later", prompt(40, 3000), 1)
    assert e.step() == {"big": 64}
    assert e.step() == {"big": 56}
    assert e.step() == {"small": 40, "later": 16}


def test_what_is_to_be_fetched_does_not_wait_for_prompts(family: Callable[..., Family]) -> None:
    from twostroke.engine.vllm.direct import notes

    e = family()
    e.add("long", prompt(200), 1)
    e.step()
    e.fetch("f", prompt(40, 500))
    assert e.step() == {"long": 63}
    assert e.rank_heard(notes.Begin).request_id == "f"
    e.ended("f")
    assert e.step() == {"f": 1, "long": 63}


def test_steps_are_told_with_what_they_held(family: Callable[..., Family]) -> None:
    from twostroke.engine.vllm.report import to_sample

    e = family()
    e.add("a", prompt(100), 3)
    for _ in range(4):
        e.step()
    samples = [to_sample(row) for report in e.reports for row in report["steps"]]
    assert [sample.batch for sample in samples] == [
        StepBatch(0, 0, 64, chunk_pairs(0, 64), 1),
        StepBatch(0, 0, 36, chunk_pairs(64, 36), 1),
        StepBatch(1, 101, 0, 0, 0),
        StepBatch(1, 102, 0, 0, 0),
    ]
    assert all(0 < sample.duration_s < 60 for sample in samples)
    assert [report["progress"] for report in e.reports] == [{"a": 64}, {}, {}, {}]


def test_the_time_of_a_step_that_was_scheduled_ahead_begins_where_the_last_one_ended(
    family: Callable[..., Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    import time

    from twostroke.engine.vllm import scheduling
    from twostroke.engine.vllm.report import to_sample

    now_s = [100.0]
    monkeypatch.setattr(scheduling, "time", type("Clock", (), {"monotonic": lambda: now_s[0]}))
    assert time.monotonic() != 100.0
    e = family(ahead=True)
    e.add("a", prompt(100), 4)
    begun = [e.plan()[0]]
    for _ in range(4):
        now_s[0] += 1
        begun.append(e.plan()[0])
        now_s[0] += 2
        e.end(begun.pop(0))
    samples = [to_sample(row) for report in e.reports for row in report["steps"]]
    assert [sample.duration_s for sample in samples] == [3, 3, 3, 3]


def test_blocks_are_told_under_the_hashes_that_a_router_computes(family: Callable[..., Family]) -> None:
    from twostroke.engine.vllm.report import to_change

    e = family()
    journal, index = KvJournal("e"), PrefixIndex()

    def heard() -> PrefixIndex:
        for report in e.reports:
            journal.record([to_change(row) for row in report["blocks"]])
        e.reports.clear()
        index.apply("w", journal.snapshot())
        return index

    tokens = prompt(100)
    for name in ("a", "twin"):
        e.add(name, tokens, 1)
    while e.scheduler.has_unfinished_requests():
        e.step()
    hashes = block_hashes(tokens, BLOCK)
    assert heard().hits(hashes) == {"w": 6}
    assert index.hits(block_hashes(tokens, BLOCK, KvIdentity(salt="other"))) == {}
    assert len(journal) == 6, "whoever computed the same at the same time"
    for number in range(2):
        e.add(f"{number}", prompt(240, 1000 * (number + 1)), 1)
        while e.scheduler.has_unfinished_requests():
            e.step()
    assert heard().hits(hashes).get("w", 0) < 6
    assert len(journal) <= 23
    cached = sum(block.block_hash is not None for block in e.pool.blocks)
    assert len(journal) == cached, "no block twice"
    assert e.scheduler.reset_prefix_cache()
    e.add("last", prompt(5, 9000), 1)
    e.step()
    heard()
    assert len(journal) == 0


def test_steps_are_bounded_while_short_prompts_come(
    family: Callable[..., Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token takes 10 ms here, and a step is to take 400 at most."""
    from twostroke.engine.vllm import scheduling
    from twostroke.policy.turns import SHORT_S

    now_s = [100.0]
    monkeypatch.setattr(scheduling, "time", type("Clock", (), {"monotonic": lambda: now_s[0]}))
    e = family()

    def step() -> dict[str, int]:
        planned, shares = e.plan()
        now_s[0] += 0.01 * sum(shares.values())
        e.end(planned)
        return shares

    scheduling.bound_steps(e, 0.4)
    for number in range(8):
        e.add(f"{number}", prompt(50, 100 * number), 1)
        step()
    e.add("long", prompt(230, 5000), 1)
    assert step() == {"long": 64}, "nobody short came"
    e.add("short", prompt(12, 6000), 1)
    assert step() == {"long": 8, "short": 12}
    assert step() == {"long": 32}
    now_s[0] += SHORT_S
    assert step() == {"long": 64}
    scheduling.bound_steps(e, 0.0)
    e.add("another", prompt(12, 7000), 1)
    step()
    assert step() == {"long": 230 - 64 - 8 - 32 - 64 - 16}, "more than 32"


def test_work_on_spare_cores_counts_as_done_on_own_ones(family: Callable[..., Family]) -> None:
    """A worker promises what it can do by itself."""
    from twostroke.engine.vllm.report import to_sample

    e = family()
    e.add("a", prompt(60), max_tokens=1)
    planned, _ = e.plan()
    e.end(planned, spared_s=100.0)
    ((row,),) = [report["steps"] for report in e.reports if report["steps"]]
    assert 100 <= to_sample(row).duration_s < 160
    assert to_sample(row).spared_s == 100
