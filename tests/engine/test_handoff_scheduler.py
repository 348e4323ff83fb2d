"""Our scheduler over vLLM's, in this process, with made-up steps: what cannot be had from a model on demand."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore"),  # what vLLM's imports warn of is not ours
]

BLOCK = 16
BLOCKS = 24


class Family:
    """A core, with mailboxes in the place of its rank and its main process."""

    def __init__(self, model: str, folder: Path, recompute_tokens: int) -> None:
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from twostroke.config import WorkerSettings
        from twostroke.engine.vllm.direct import notes
        from twostroke.engine.vllm.direct.handoffs import DirectHandoffs
        from twostroke.engine.vllm.direct.scheduler import HandoffScheduler
        from twostroke.engine.vllm.launch import create_config

        self.handoffs = DirectHandoffs("w", "e")
        settings = WorkerSettings(
            model=model,
            step_budget_tokens=64,
            block_size_tokens=BLOCK,
            max_model_len_tokens=256,
            kv_recompute_tokens=recompute_tokens,
            kv_lease_s=1,
        )
        config = create_config(settings, self.handoffs.arguments(settings, "w-e"))
        self.handoffs.adjust(config)
        config.cache_config.num_gpu_blocks = BLOCKS
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        kv = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.heard: dict[str, queue.SimpleQueue[Any]] = {}
        box = notes.Mailbox(Path(config.kv_transfer_config.kv_connector_extra_config["folder"]), notes.rank_name(0))
        self.heard["rank"] = queue.SimpleQueue()
        box.listen(self.heard["rank"].put, "rank")
        self.main: list[Any] = []
        self.handoffs._take = self.main.append  # type: ignore[method-assign]
        self.scheduler: Any = HandoffScheduler(
            vllm_config=config,
            kv_cache_config=kv,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
            log_stats=True,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free = self.pool.get_num_free_blocks()
        self._next_token = 1000

    def add(self, request_id: str, prompt: list[int], max_tokens: int, **params: Any) -> None:
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        init_none_hash(sha256)
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        hasher = get_request_block_hasher(BLOCK, sha256)
        self.scheduler.add_request(Request(request_id, prompt, sampling, None, block_hasher=hasher))

    def offer(self, request_id: str, prompt: list[int], max_tokens: int = 1) -> None:
        self.add(request_id, prompt, max_tokens, **self.handoffs.offer())

    def fetch(self, request_id: str, prompt: list[int], max_tokens: int = 8, *, token_known: bool = False) -> None:
        from twostroke.v1.kv_pb2 import Handoff

        handoff = Handoff(handoff_id=request_id, tokens=len(prompt), in_progress=True)
        self.add(request_id, prompt, max_tokens, **self.handoffs.fetch(handoff, token_known=token_known))

    def step(self) -> dict[str, int]:
        """One step; every request that has its prompt chooses a token. Returns the tokens that were computed."""
        from vllm.v1.outputs import ModelRunnerOutput

        planned = self.scheduler.schedule()
        scheduled: dict[str, int] = dict(planned.num_scheduled_tokens)
        tokens = []
        for request_id in scheduled:
            request = self.scheduler.requests[request_id]
            self._next_token += 1
            tokens.append([self._next_token] if request.num_computed_tokens >= request.num_tokens else [])
        ids = list(scheduled)
        output = ModelRunnerOutput(ids, {name: index for index, name in enumerate(ids)}, tokens)
        self.scheduler.update_from_output(planned, output)
        return scheduled

    def tell(self, note: Any) -> None:
        """As a rank or main would."""
        self.scheduler.connector.core.inbox.put(note)

    def ended(self, request_id: str, failure: str | None = None, missing: tuple[int, ...] = (), **more: Any) -> None:
        from twostroke.engine.vllm.direct import notes

        said = {"first_token_id": 7, "corrupt": False, "unusable": False, **more}
        self.tell(
            notes.Ended(
                rank=0, request_id=request_id, nbytes=1, duration_s=0.0, failure=failure, missing=list(missing), **said
            )
        )

    def hold(self, request_id: str) -> str:
        """The name of the hold of a request."""
        return str(self.scheduler.connector.core.held._holds[request_id].name)

    def rank_heard(self, kind: type) -> Any:
        """The next note of this kind that the rank got."""
        while True:
            note = self.heard["rank"].get(timeout=5)
            if isinstance(note, kind):
                return note

    def main_heard(self) -> list[Any]:
        """What main got."""
        self.handoffs._take_notes()
        heard, self.main[:] = list(self.main), []
        return heard

    def in_use(self) -> int:
        return int(self.free - self.pool.get_num_free_blocks())


@pytest.fixture
def family(model: str, tmp_path: Path) -> Iterator[Callable[..., Family]]:
    made: list[Family] = []

    def make(recompute_tokens: int = 64) -> Family:
        made.append(Family(model, tmp_path, recompute_tokens))
        return made[-1]

    yield make
    for each in made:
        each.handoffs.close()


def prompt(tokens: int, first: int = 0) -> list[int]:
    return list(range(first, first + tokens))


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
