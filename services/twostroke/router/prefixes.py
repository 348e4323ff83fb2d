"""Whose prefix caches hold how much of a prompt: an index fed by the workers' KV events, asked once per placement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from twostroke.policy.block_hash import KvIdentity, block_hashes
from twostroke.policy.kv_events import Applied, Cleared, KvEvents, Removed, Stored
from twostroke.policy.prefix_index import PrefixIndex
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.worker_pb2 import BlockHashing, KvChange, WatchKvEventsResponse

ALGORITHM = "sha256"
MOST_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class _Hashing:
    """How the blocks of an index are named."""

    root: bytes
    block_size_tokens: int


class Prefixes:
    """One index for all workers that name their blocks alike. By the workers' addresses."""

    def __init__(self) -> None:
        self._indexes: dict[_Hashing, PrefixIndex] = {}
        self._hashing: dict[str, _Hashing] = {}

    @property
    def blocks(self) -> int:
        """Blocks known."""
        return sum(map(len, self._indexes.values()))

    def forget(self, address: str) -> None:
        """A worker is gone."""
        hashing = self._hashing.pop(address, None)
        if hashing is not None and (index := self._indexes.get(hashing)) is not None:
            index.remove_worker(address)

    def apply(self, address: str, hashing: BlockHashing, events: WatchKvEventsResponse) -> bool:
        """Takes a batch of a worker's events. Returns whether something was missed: the worker counts as holding
        nothing until its events are asked for anew. Blocks with names that cannot be computed here are ignored."""
        names = _Hashing(hashing.root, hashing.block_size_tokens)
        if hashing.algorithm != ALGORITHM or not names.block_size_tokens:
            return False
        if self._hashing.setdefault(address, names) != names:
            self.forget(address)
            self._hashing[address] = names
        index = self._indexes.setdefault(names, PrefixIndex())
        changes = [_change(change) for change in events.changes]
        batch = KvEvents(events.epoch, events.sequence, changes, events.snapshot)
        return index.apply(address, batch) is Applied.RESYNC

    def cached_tokens(self, request: EngineRequest) -> Mapping[str, int]:
        """Prompt tokens that each worker has, from the start of the prompt; workers that have none are left out.

        Takes 1.5 us for each block of the prompt that some worker has.
        """
        found: dict[str, int] = {}
        sampling = request.sampling
        if sampling.skip_reading_prefix_cache or sampling.HasField("prompt_logprobs"):
            # All of the prompt is computed.
            return found
        for hashing, index in self._indexes.items():
            if len(index):
                hits = index.hits(_known_hashes(request, hashing, index))
                found.update({address: blocks * hashing.block_size_tokens for address, blocks in hits.items()})
        return found


def _known_hashes(request: EngineRequest, hashing: _Hashing, index: PrefixIndex) -> list[bytes]:
    """The hashes of a prompt's blocks, as far as somebody may have them: the rest of a long prompt is not worth it."""
    found: list[bytes] = []
    size, parent, identity = hashing.block_size_tokens, hashing.root, _identity(request)
    for start, count in _pieces(len(request.prompt_token_ids) // size):
        tokens = request.prompt_token_ids[start * size : (start + count) * size]
        found += block_hashes(tokens, size, identity, root=parent)
        parent, identity = found[-1], replace(identity, salt=None)
        if parent not in index:
            break
    return found


def _pieces(blocks: int) -> Iterator[tuple[int, int]]:
    """(first block, number of blocks): a few at first, then more at once."""
    start, count = 0, 1
    while start < blocks:
        yield start, min(count, blocks - start)
        start, count = start + count, min(2 * count, MOST_AT_ONCE)


def _identity(request: EngineRequest) -> KvIdentity:
    """What else changes KV. Workers name each version of an adapter apart."""
    adapter = request.adapter
    return KvIdentity(
        salt=request.cache_salt if request.HasField("cache_salt") else None,
        lora=(f"{adapter.name}@{adapter.digest}", adapter.path) if request.HasField("adapter") else None,
    )


def _change(change: KvChange) -> Stored | Removed | Cleared:
    kind = change.WhichOneof("change")
    if kind == "stored":
        parent = change.stored.parent_hash if change.stored.HasField("parent_hash") else None
        return Stored(change.stored.block_hashes, parent)
    return Removed(change.removed.block_hashes) if kind == "removed" else Cleared()
