"""From workers' KV events to the tokens that a prompt need not compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from twostroke.policy.block_hash import DEFAULT_ROOT, KvIdentity, block_hashes
from twostroke.policy.prefix_index import key
from twostroke.router import prefixes
from twostroke.router.prefixes import Prefixes
from twostroke.v1.engine_pb2 import Adapter, EngineRequest, SamplingParams
from twostroke.v1.worker_pb2 import (
    BlockHashing,
    KvBlocksCleared,
    KvBlocksRemoved,
    KvBlocksStored,
    KvChange,
    WatchKvEventsResponse,
)

HASHING = BlockHashing(algorithm="sha256", root=DEFAULT_ROOT, block_size_tokens=16)
PROMPT = list(range(1000))


def stored(tokens: Sequence[int], identity: KvIdentity | None = None) -> KvChange:
    hashes = block_hashes(tokens, 16, identity or KvIdentity(), root=DEFAULT_ROOT)
    return KvChange(stored=KvBlocksStored(block_hashes=map(key, hashes)))


def events(*changes: KvChange, sequence: int = 0, snapshot: bool = False, epoch: str = "e") -> WatchKvEventsResponse:
    return WatchKvEventsResponse(epoch=epoch, sequence=sequence, snapshot=snapshot, changes=changes)


def asked(tokens: Sequence[int] = PROMPT, **more: Any) -> EngineRequest:
    return EngineRequest(prompt_token_ids=tokens, **more)


@pytest.fixture
def known() -> Prefixes:
    made = Prefixes()
    assert not made.apply("a", HASHING, events(stored(PROMPT[:640]), snapshot=True))
    assert not made.apply("b", HASHING, events(stored(PROMPT[:50]), snapshot=True))
    return made


def test_every_worker_has_what_it_told_of(known: Prefixes) -> None:
    assert known.cached_tokens(asked()) == {"a": 640, "b": 48}
    assert known.cached_tokens(asked(PROMPT[:40])) == {"a": 32, "b": 32}
    assert known.cached_tokens(asked(PROMPT[1:])) == {}
    assert known.cached_tokens(asked(PROMPT[:15])) == {}
    assert known.blocks == 40


def test_what_changes_kv_changes_the_answer(known: Prefixes) -> None:
    adapter = Adapter(name="cook", path="/adapters/cook", digest="0123")
    known.apply("c", HASHING, events(stored(PROMPT[:320], KvIdentity(salt="s")), snapshot=True))
    known.apply("d", HASHING, events(stored(PROMPT, KvIdentity(lora=("cook@0123", "/adapters/cook"))), snapshot=True))
    assert known.cached_tokens(asked(cache_salt="s")) == {"c": 320}
    assert known.cached_tokens(asked(adapter=adapter)) == {"d": 992}
    assert known.cached_tokens(asked(adapter=adapter, cache_salt="s")) == {}
    assert known.cached_tokens(asked(sampling=SamplingParams(skip_reading_prefix_cache=True))) == {}
    assert known.cached_tokens(asked(sampling=SamplingParams(prompt_logprobs=0))) == {}


def test_blocks_go_as_they_came(known: Prefixes) -> None:
    last = block_hashes(PROMPT[:640], 16, root=DEFAULT_ROOT)[-1]
    known.apply("a", HASHING, events(KvChange(removed=KvBlocksRemoved(block_hashes=[key(last)])), sequence=1))
    assert known.cached_tokens(asked()) == {"a": 624, "b": 48}
    known.apply("a", HASHING, events(KvChange(cleared=KvBlocksCleared()), sequence=2))
    assert known.cached_tokens(asked()) == {"b": 48}
    known.forget("b")
    assert known.cached_tokens(asked()) == {}
    known.forget("nobody")


def test_a_gap_is_noticed_and_a_snapshot_mends_it(known: Prefixes) -> None:
    assert known.apply("a", HASHING, events(stored(PROMPT), sequence=5))
    assert known.cached_tokens(asked()) == {"b": 48}
    assert not known.apply("a", HASHING, events(stored(PROMPT[:160]), sequence=9, snapshot=True))
    assert known.cached_tokens(asked()) == {"a": 160, "b": 48}
    assert not known.apply("a", HASHING, events(stored(PROMPT), sequence=0, snapshot=True, epoch="f"))
    assert known.cached_tokens(asked()) == {"a": 992, "b": 48}


def test_names_that_cannot_be_computed_are_ignored(known: Prefixes) -> None:
    other = BlockHashing(algorithm="xxhash", root=DEFAULT_ROOT, block_size_tokens=16)
    assert not known.apply("x", other, events(stored(PROMPT), snapshot=True))
    assert known.cached_tokens(asked()) == {"a": 640, "b": 48}


def test_workers_with_other_blocks_have_an_index_of_their_own(known: Prefixes) -> None:
    large = BlockHashing(algorithm="sha256", root=DEFAULT_ROOT, block_size_tokens=32)
    hashes = map(key, block_hashes(PROMPT[:640], 32, root=DEFAULT_ROOT))
    change = KvChange(stored=KvBlocksStored(block_hashes=hashes))
    known.apply("a", large, events(change, snapshot=True))
    assert known.cached_tokens(asked()) == {"a": 640, "b": 48}
    assert known.cached_tokens(asked(PROMPT[:48])) == {"a": 32, "b": 48}


def test_no_more_of_a_prompt_is_hashed_than_may_be_known(known: Prefixes, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def count(tokens: Sequence[int], *more: Any, **named: Any) -> list[bytes]:
        nonlocal hashed
        hashed += len(tokens) // 16
        return block_hashes(tokens, *more, **named)

    monkeypatch.setattr(prefixes, "block_hashes", count)
    assert known.cached_tokens(asked([7, *range(32_000)])) == {}
    assert hashed == 1
    assert known.cached_tokens(asked([*PROMPT[:320], *range(32_000)])) == {"a": 320, "b": 48}
    assert hashed < 1 + 2 * 320 // 16
    hashed = 0
    assert Prefixes().cached_tokens(asked()) == {}
    assert hashed == 0
