"""KV blocks of one worker: what sequences hold, and the prefixes that stay cached in what they do not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Items


class Holding:
    """Blocks of one sequence. private: in blocks; shared: hashes of cached prefix units it refers to."""

    __slots__ = ("private", "shared")

    def __init__(self, private: int, shared: list[int]) -> None:
        self.private = private
        self.shared = shared


class BlockStore:
    """Counts blocks; keeps a prefix cache of hash units, least recently released evicted first.

    total: blocks of the worker. unit: blocks that one prefix hash stands for, 0 for no prefix cache. Blocks that only
    cache a prefix count as free: they are evicted, oldest first, when sequences need them.
    """

    __slots__ = ("_idle", "_references", "total", "unit", "used")

    def __init__(self, total: int, unit: int) -> None:
        self.total = total
        self.unit = unit
        self.used = 0
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that sequences may still take."""
        return self.total - self.used

    @property
    def spare(self) -> int:
        """Blocks that neither a sequence nor a cached prefix has."""
        return self.total - self.used - self.unit * len(self._idle)

    def hits(self, hashes: Items[int]) -> int:
        """Leading hashes whose blocks are here."""
        references, idle = self._references, self._idle
        found = 0
        for key in hashes:
            if key not in references and key not in idle:
                break
            found += 1
        return found

    def shared_now(self, hashes: Items[int], hits: int) -> int:
        """Of the first `hits` hashes, those that sequences hold already, so that another costs no block."""
        references = self._references
        return sum(1 for key in hashes[:hits] if key in references)

    def take(self, hashes: Items[int], hits: int, blocks: int) -> Holding:
        """Holds `blocks` blocks, the first `hits` units of them from the cache. The caller has checked for room."""
        references, idle, unit = self._references, self._idle, self.unit
        fresh = blocks - hits * unit
        shared = list(hashes[:hits])
        for key in shared:
            count = references.get(key)
            if count is None:
                del idle[key]
                references[key] = 1
                fresh += unit
            else:
                references[key] = count + 1
        self.used += fresh
        if idle:
            self._evict()
        return Holding(blocks - hits * unit, shared)

    def fits(self, hashes: Items[int], hits: int, blocks: int) -> bool:
        """Whether `take` would find room."""
        missing = blocks - self.total + self.used
        return missing <= 0 or (hits > 0 and missing <= self.unit * self.shared_now(hashes, hits))

    def publish(self, holding: Holding, hashes: Items[int]) -> None:
        """The sequence has computed the prefix units of `hashes`: those that nobody cached yet become shared."""
        references, idle, unit, shared = self._references, self._idle, self.unit, holding.shared
        fresh = dict.fromkeys(hashes[len(shared) :], 1)
        if (
            len(fresh) == len(hashes) - len(shared)
            and references.keys().isdisjoint(fresh)
            and idle.keys().isdisjoint(fresh)
        ):
            references.update(fresh)
            shared.extend(fresh)
            holding.private -= unit * len(fresh)
            return
        for key in hashes[len(shared) :]:
            # Computed twice at the same time: the second copy stays private, and so does what follows it.
            if key in references or key in idle:
                break
            references[key] = 1
            shared.append(key)
            holding.private -= unit

    def grow(self, blocks: int) -> None:
        """Sequences take further blocks. The caller has checked for room, and adds them to the holdings at the end."""
        self.used += blocks
        if self._idle:
            self._evict()

    def drop(self, holding: Holding) -> None:
        """The sequence is gone; its published prefix stays cached until the room is needed."""
        references, idle = self._references, self._idle
        self.used -= holding.private
        # The tail first, so that the tail is evicted first.
        for key in reversed(holding.shared):
            count = references[key]
            if count > 1:
                references[key] = count - 1
            else:
                del references[key]
                idle[key] = None
                self.used -= self.unit

    def _evict(self) -> None:
        idle = self._idle
        over = self.used + self.unit * len(idle) - self.total
        if over > 0:
            pop = idle.popitem
            for _ in range(min(len(idle), -(-over // self.unit))):
                pop(False)
