"""The reference engine's KV blocks: who has them, which are free, and which of the free ones still cache a prefix."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from twostroke.engine.reference_kv import KINDS, LAYERS
from twostroke.kv.shm import Segment, Words
from twostroke.policy.kv_events import Change, Removed, Stored

PrefixKey = bytes
"""The block's hash; see policy/block_hash.py."""


class BlockPool:
    """Counts the users of every block of a segment.

    A block without users is free. It keeps its content and its key until it is taken again; blocks without a key are
    taken first, then the one that has been free for longest.
    """

    def __init__(self, segment: Segment, block_size_tokens: int) -> None:
        blocks = len(segment.holds)
        self.segment = segment
        self.block_size_tokens = block_size_tokens
        self.kv: Words = segment.words.reshape(blocks, LAYERS, KINDS, block_size_tokens)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._users = [0] * blocks
        self._block_of: dict[PrefixKey, int] = {}
        self._key_of: dict[int, PrefixKey] = {}
        self._generation = 0
        self._changes: list[Change] = []

    @property
    def free_blocks(self) -> int:
        """Blocks without users."""
        return len(self._free)

    @property
    def used_blocks(self) -> int:
        """Blocks with users."""
        return len(self._users) - len(self._free)

    def next_generation(self) -> int:
        """A number above all given so far, for a stamp or a hold."""
        self._generation += 1
        return self._generation

    def blocks_for(self, tokens: int) -> int:
        """Blocks that so many tokens fill."""
        return -(-tokens // self.block_size_tokens)

    def cached(self, keys: Iterable[PrefixKey]) -> list[int]:
        """The blocks that hold these keys, up to the first key that none holds."""
        found = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def can_take(self, cached: Sequence[int], new: int) -> bool:
        """Whether the cached blocks and so many new ones can be had together."""
        return new + sum(not self._users[block] for block in cached) <= len(self._free)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a user to blocks that have content."""
        for block in blocks:
            if not self._users[block]:
                del self._free[block]
            self._users[block] += 1

    def take(self, count: int) -> list[int]:
        """Free blocks for new content; there must be as many."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self.forget(block)
            self._users[block] = 1
            self.segment.generations[block] = self.next_generation()
        return taken

    def give_back(self, blocks: Sequence[int]) -> None:
        """Takes a user away from each block."""
        # The end of a prefix is of use to fewer requests than its beginning, so it is freed, and taken, first.
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._key_of)

    def publish(self, key: PrefixKey, block: int, parent: PrefixKey | None) -> None:
        """Offers a full block to other requests, unless one is on offer for the same key. parent: the key before it."""
        if self._block_of.setdefault(key, block) == block and block not in self._key_of:
            self._key_of[block] = key
            self._changes.append(Stored((key,), parent))

    def forget(self, block: int) -> None:
        """Stops offering a block."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key]
            self._changes.append(Removed((key,)))

    def take_changes(self) -> list[Change]:
        """What is on offer that was not, and the reverse, since the last call."""
        changes, self._changes = self._changes, []
        return changes
