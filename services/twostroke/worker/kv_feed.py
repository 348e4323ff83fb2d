"""Tells whoever listens what KV blocks the engine has."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence

from twostroke.policy.kv_events import Change, Cleared, KvEvents, Stored
from twostroke.policy.kv_journal import KvJournal
from twostroke.policy.prefix_index import key
from twostroke.v1 import worker_pb2 as pb

COLLECT_S = 0.05
"""Changes are told together that come within this time."""
KEPT_BATCHES = 256
"""A listener that is further behind gets a snapshot."""


class KvFeed:
    """One per worker."""

    def __init__(self, epoch: str) -> None:
        self._journal = KvJournal(epoch)
        self._pending: list[Change] = []
        self._kept: deque[KvEvents] = deque(maxlen=KEPT_BATCHES)
        self._changed = asyncio.Event()
        """Replaced with each batch."""

    def took(self, changes: Sequence[Change]) -> None:
        """The engine reports changes."""
        if changes and not self._pending:
            asyncio.get_running_loop().call_later(COLLECT_S, self._flush)
        self._pending.extend(changes)

    def _flush(self) -> None:
        changes, self._pending = self._pending, []
        if batch := self._journal.record(changes):
            self._kept.append(batch)
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()

    async def watch(self) -> AsyncIterator[KvEvents]:
        """A snapshot, then every batch; another snapshot where batches were missed. Never ends by itself."""
        told = None
        while True:
            changed = self._changed
            if told is None or (self._kept and self._kept[0].sequence > told + 1):
                batches = [self._journal.snapshot()]
            else:
                batches = [batch for batch in self._kept if batch.sequence > told]
            for batch in batches:
                told = batch.sequence
                yield batch
            if not batches:
                await changed.wait()


def to_wire(events: KvEvents) -> pb.WatchKvEventsResponse:
    """Events of a KvFeed as a message."""
    message = pb.WatchKvEventsResponse(epoch=events.epoch, sequence=events.sequence, snapshot=events.snapshot)
    for change in events.changes:
        wire = message.changes.add()
        if isinstance(change, Cleared):
            wire.cleared.SetInParent()
            continue
        kind = wire.stored if isinstance(change, Stored) else wire.removed
        kind.block_hashes.extend(map(key, change.block_hashes))
        if isinstance(change, Stored) and change.parent is not None:
            wire.stored.parent_hash = key(change.parent)
    return message
