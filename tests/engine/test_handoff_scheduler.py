"""Our scheduler over vLLM's, in this process, with made-up steps: what cannot be had from a model on demand."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.scheduler_rig import BLOCK, Family, prompt

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's imports warn of is not ours
]


def test_blocks_are_announced_as_the_steps_complete_them_and_held_after_the_end(
    family: Callable[..., Family],
) -> None:
    """O-16: what is announced is complete, and it stays until it was read."""
    from twostroke.engine.vllm.direct import notes

    p = family()
    p.offer("a", prompt(100))
    planned = p.scheduler.schedule()
    assert planned.kv_connector_metadata.announcements[0][:2] == (p.hold("a"), 0)
    assert len(planned.kv_connector_metadata.announcements[0][2]) == 64 // BLOCK
    started = next(note for note in p.main_heard() if isinstance(note, notes.Started))
    assert p.scheduler.connector.core.held._table._table.word(started.slot) == started.generation
    from vllm.v1.outputs import ModelRunnerOutput

    p.scheduler.update_from_output(planned, ModelRunnerOutput(["a"], {"a": 0}, [[]]))
    assert p.step() == {"a": 36}
    finish = p.rank_heard(notes.Finish)
    assert (finish.blocks, finish.first_token_id) == (7, 1001)
    p.step()
    assert not p.scheduler.has_requests(), "a hold is no reason to step"
    assert p.in_use() == 7
    p.tell(notes.Read(0, p.hold("a")))
    assert p.scheduler.has_requests(), "news is"
    p.step()
    assert p.in_use() == 0
    assert p.scheduler.connector.core.held._table._table.word(started.slot) == 0
    assert p.rank_heard(notes.Withdraw).hold.startswith("a#")


def test_a_prompt_that_is_aborted_gives_its_blocks_back_at_once(family: Callable[..., Family]) -> None:
    """O-25, O-28: nobody waits for a timer."""
    from vllm.v1.request import RequestStatus

    from twostroke.engine.vllm.direct import notes

    p = family()
    p.offer("a", prompt(100))
    p.step()
    hold = p.hold("a")
    p.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    assert p.rank_heard(notes.Withdraw).hold == hold
    p.step()
    assert p.in_use() == 0
    p.tell(notes.Release(["a"]))
    p.tell(notes.Read(0, hold))
    p.step()
    assert p.in_use() == 0, "O-31: the end comes once, whoever says it"


def test_news_of_an_earlier_hold_does_not_end_the_one_of_the_same_request(family: Callable[..., Family]) -> None:
    """O-84: a prompt that is computed again under its id is another hand-off."""
    from vllm.v1.request import RequestStatus

    from twostroke.engine.vllm.direct import notes

    p = family()
    p.offer("a", prompt(20))
    p.step()
    earlier = p.hold("a")
    p.tell(notes.Release(["a"]))
    p.step()
    assert p.rank_heard(notes.Withdraw).hold == earlier
    p.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    p.offer("a", prompt(20))
    p.step()
    assert p.hold("a") != earlier
    p.tell(notes.Read(0, earlier))
    p.step()
    assert p.in_use() == 2
    p.tell(notes.Read(0, p.hold("a")))
    p.step()
    assert p.in_use() == 0


def test_an_answer_that_ends_with_its_first_token_offers_nothing(family: Callable[..., Family]) -> None:
    """O-32: a prompt that stops on its own is not held for anyone."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    from twostroke.engine.vllm.direct import notes

    p = family()
    sampling = SamplingParams(
        max_tokens=1, stop_token_ids=[1001], ignore_eos=True, extra_args={"kv_transfer_params": p.handoffs.offer()}
    )
    p.scheduler.add_request(Request("a", prompt(10), sampling, None))
    p.step()
    assert p.rank_heard(notes.Withdraw).hold.startswith("a#")
    assert p.in_use() == 0


def test_a_lease_ends_unless_it_is_renewed(family: Callable[..., Family], monkeypatch: pytest.MonkeyPatch) -> None:
    """O-03, O-90: monotonic time only, and the word changes before the blocks go."""
    from twostroke.engine.vllm.direct import notes

    p = family()
    held = p.scheduler.connector.core.held
    now = [100.0]
    monkeypatch.setattr(held, "_clock", lambda: now[0])
    p.offer("a", prompt(20))
    p.step()
    now[0] += 0.9
    p.tell(notes.Renewed(p.hold("a")))
    p.step()
    p.step()
    now[0] += 0.9
    assert not p.scheduler.has_requests()
    assert p.in_use() == 2
    now[0] += 0.2
    assert p.scheduler.has_requests()
    p.step()
    assert p.in_use() == 0


def test_a_waiting_request_lets_the_core_sleep_and_goes_on_when_its_kv_is_here(
    family: Callable[..., Family],
) -> None:
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("a", prompt(40))
    assert d.rank_heard(notes.Expect).request_id == "a"
    assert d.step() == {}
    begin = d.rank_heard(notes.Begin)
    assert (begin.first, len(begin.block_ids)) == (0, 3)
    assert not d.scheduler.has_requests()
    assert d.in_use() == 3
    d.ended("a")
    assert d.scheduler.has_requests()
    assert d.step() == {"a": 1}, "only the last token of the prompt is computed"
    d.fetch("b", [*prompt(32), *prompt(20, 500)])
    d.step()
    begin = d.rank_heard(notes.Begin)
    assert (begin.first, len(begin.block_ids)) == (2, 2), "O-05: what is missing, and nothing else"


def test_an_idle_core_steps_now_and_then_while_kv_is_on_its_way(
    family: Callable[..., Family], monkeypatch: pytest.MonkeyPatch
) -> None:
    from twostroke.engine.vllm.direct import connector

    d = family()
    monkeypatch.setattr(connector, "AWAKE_S", 0.01)
    core, woken = d.scheduler.connector.core, threading.Event()
    core.wake = woken.set
    d.fetch("a", prompt(40))
    d.step()
    assert woken.wait(10), "nobody else tells the core anything"
    assert d.scheduler.has_requests()
    assert d.step() == {}, "there is nothing to compute"
    woken.clear()
    assert woken.wait(10)
    d.ended("a")
    assert d.step() == {"a": 1}


def test_a_few_missing_blocks_are_computed_again_and_only_those(family: Callable[..., Family]) -> None:
    """O-02: the request goes on from the last good block."""
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("a", prompt(96))
    d.step()
    blocks = d.rank_heard(notes.Begin).block_ids
    d.ended("a", "lost on the way", (blocks[3], blocks[5]))
    assert d.step() == {"a": 96 - 3 * BLOCK}
    assert next(note for note in d.main_heard() if isinstance(note, notes.Recomputed)).tokens == 2 * BLOCK


@pytest.mark.parametrize(
    "said", [{"first_token_id": None}, {"unusable": True}], ids=["first token unknown", "memory unsafe"]
)
def test_what_cannot_be_computed_again_fails_and_frees_its_blocks(
    family: Callable[..., Family], said: dict[str, Any]
) -> None:
    """O-02, O-26, O-41: the one request fails, and nothing else."""
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("a", prompt(40))
    d.fetch("b", prompt(40, 300))
    d.step()
    missing = tuple(d.rank_heard(notes.Begin).block_ids)
    d.ended("a", "the source is gone", missing, **said)
    d.ended("b")
    assert d.step() == {"b": 1}
    failed = [note for note in d.main_heard() if isinstance(note, notes.Failed)]
    assert [(note.request_id, note.reason) for note in failed] == [("a", "the source is gone")]
    assert "a" not in d.scheduler.requests
    pinned = len(missing) if said.get("unusable") else 0
    assert d.in_use() == 3 + pinned, "O-04: memory that may still be written is never used again"


def test_more_than_the_setting_allows_fails(family: Callable[..., Family]) -> None:
    from twostroke.engine.vllm.direct import notes

    d = family(recompute_tokens=BLOCK)
    d.fetch("a", prompt(40))
    d.step()
    d.ended("a", "lost", tuple(d.rank_heard(notes.Begin).block_ids), corrupt=True)
    d.step()
    failed = [note for note in d.main_heard() if isinstance(note, notes.Failed)]
    assert [note.corrupt for note in failed] == [True]
    assert d.in_use() == 0


def test_kv_that_arrived_wrong_is_never_computed_again_unseen(family: Callable[..., Family]) -> None:
    """O-01, O-15: it fails as corrupt, so that the link is held to account."""
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("a", prompt(40))
    d.step()
    d.ended("a", "what arrived is not what it has", tuple(d.rank_heard(notes.Begin).block_ids[:1]), corrupt=True)
    assert d.step() == {}
    failed = [note for note in d.main_heard() if isinstance(note, notes.Failed)]
    assert [(note.request_id, note.corrupt) for note in failed] == [("a", True)]
    assert d.in_use() == 0


def test_a_transfer_thread_that_ends_takes_the_engine_with_it(family: Callable[..., Family]) -> None:
    """O-87: a worker that cannot move KV must not look well."""
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.tell(notes.Broken("it broke"))
    assert d.scheduler.has_requests(), "an idle core hears of it"
    with pytest.raises(RuntimeError, match="it broke"):
        d.step()


def test_blocks_of_an_aborted_receive_stay_until_no_read_can_write(family: Callable[..., Family]) -> None:
    """O-04, O-28, O-30: the rank's word frees them, and it is heard although the request is over."""
    from vllm.v1.request import RequestStatus

    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("a", prompt(40))
    d.step()
    d.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    d.step()
    assert d.rank_heard(notes.Cancel).request_id == "a"
    assert d.in_use() == 3
    assert not d.scheduler.has_requests()
    d.ended("a", "cancelled")
    d.step()
    assert d.in_use() == 0


def test_an_abort_after_arrival_and_before_the_first_step_leaks_nothing(family: Callable[..., Family]) -> None:
    """O-29."""
    from vllm.v1.request import RequestStatus

    d = family()
    d.fetch("a", prompt(40))
    d.step()
    d.ended("a")
    d.scheduler._take_news()
    d.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    d.step()
    assert d.in_use() == 0


def test_a_request_that_fails_before_there_was_room_is_over(family: Callable[..., Family]) -> None:
    """O-26, O-33: the wait for a dead source ends in the queue, too."""
    from twostroke.engine.vllm.direct import notes

    d = family()
    d.fetch("big", prompt(200))
    d.step()
    d.fetch("a", prompt(200, 300))
    d.step()
    assert d.in_use() == 13
    d.ended("a", "the source is gone", first_token_id=None)
    d.step()
    assert [note.request_id for note in d.main_heard() if isinstance(note, notes.Failed)] == ["a"]
    assert list(d.scheduler.requests) == ["big"]


def test_arrived_kv_that_finds_no_room_for_the_next_step_is_computed_again(family: Callable[..., Family]) -> None:
    """O-40: a preempted request does not ask a source that has freed its blocks."""
    d = family()
    for name, first in (("a", 0), ("b", 300)):
        d.fetch(name, prompt(176, first), 60)
        d.step()
    for name in ("a", "b"):
        d.ended(name)
    computed: dict[str, int] = {}
    for _ in range(200):
        for name, tokens in d.step().items():
            computed[name] = computed.get(name, 0) + tokens
        if not d.scheduler.requests:
            break
    assert not d.scheduler.requests
    assert computed["a"] == 60
    assert computed["b"] > 60, "the pool holds one of them to its end, not both"
    assert d.in_use() == 0
