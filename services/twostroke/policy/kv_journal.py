"""What a worker tells of its KV blocks: numbered changes, and a snapshot for whoever begins to listen.

An engine may hold a block twice, as vLLM does when two requests compute the same prompt at once; listeners hear of the
first copy and of the end of the last.
"""

from __future__ import annotations

from collections.abc import Sequence

from twostroke.policy.kv_events import BlockHash, Change, Cleared, KvEvents, Removed, Stored
from twostroke.policy.prefix_index import key


class KvJournal:
    """Mirrors the blocks of one engine. Costs about 150 bytes a block."""

    def __init__(self, epoch: str) -> None:
        self._epoch = epoch
        self._sequence = 0
        self._parents: dict[int, int | None] = {}
        """Of every block, in the order in which they came."""
        self._copies: dict[int, int] = {}
        """Of blocks that are there more than once."""

    def __len__(self) -> int:
        """Blocks."""
        return len(self._parents)

    def record(self, changes: Sequence[Change]) -> KvEvents | None:
        """The next batch for listeners; None when the changes are nothing to them."""
        told: list[Change] = []
        for change in changes:
            if isinstance(change, Stored):
                self._store(change, told)
            elif isinstance(change, Removed):
                if gone := [block for block in map(key, change.block_hashes) if self._remove(block)]:
                    told.append(Removed(gone))
            else:
                self._parents.clear()
                self._copies.clear()
                told.append(Cleared())
        if not told:
            return None
        self._sequence += 1
        return KvEvents(self._epoch, self._sequence, told)

    def snapshot(self) -> KvEvents:
        """All blocks, in runs in which each is the parent of the next."""
        runs: list[Change] = []
        for block, parent in self._parents.items():
            _append(runs, block, parent)
        return KvEvents(self._epoch, self._sequence, runs, snapshot=True)

    def _store(self, stored: Stored, told: list[Change]) -> None:
        parent = None if stored.parent is None else key(stored.parent)
        for block in map(key, stored.block_hashes):
            if block in self._parents:
                self._copies[block] = self._copies.get(block, 1) + 1
            else:
                self._parents[block] = parent
                _append(told, block, parent)
            parent = block

    def _remove(self, block: int) -> bool:
        """Whether that was its last copy."""
        copies = self._copies.pop(block, 1)
        if copies > 2:
            self._copies[block] = copies - 1
        if copies > 1 or block not in self._parents:
            return False
        del self._parents[block]
        return True


def _append(runs: list[Change], block: int, parent: BlockHash | None) -> None:
    """Adds a block to the last run if it follows on it, else begins another."""
    last = runs[-1] if runs else None
    if isinstance(last, Stored) and isinstance(last.block_hashes, list) and last.block_hashes[-1] == parent:
        last.block_hashes.append(block)
    else:
        runs.append(Stored([block], parent))
