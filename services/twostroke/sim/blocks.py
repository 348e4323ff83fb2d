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

    __slots__ = ("_idle", "_units", "total", "unit", "used")

    def __init__(self, total: int, unit: int) -> None:
        self.total = total
        self.unit = unit
        self.used = 0
        self._units: dict[int, int] = {}
        """Cached units and how many sequences refer to each."""
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Those that none does, the least recently released first."""

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
        units = self._units
        found = 0
        for key in hashes:
            if key not in units:
                break
            found += 1
        return found

    def shared_now(self, hashes: Items[int], hits: int) -> int:
        """Of the first `hits` hashes, those that sequences hold already, so that another costs no block."""
        units = self._units
        return sum(1 for key in hashes[:hits] if units[key])

    def take(self, hashes: Items[int], hits: int, blocks: int) -> Holding:
        """Holds `blocks` blocks, the first `hits` units of them from the cache. The caller has checked for room."""
        units, idle = self._units, self._idle
        private = blocks - hits * self.unit
        shared = list(hashes[:hits])
        woken = 0
        for key in shared:
            count = units[key]
            units[key] = count + 1
            if not count:
                del idle[key]
                woken += 1
        self.used += private + woken * self.unit
        if idle:
            self._evict()
        return Holding(private, shared)

    def fits(self, hashes: Items[int], hits: int, blocks: int) -> bool:
        """Whether `take` would find room."""
        missing = blocks - self.total + self.used
        return missing <= 0 or (hits > 0 and missing <= self.unit * self.shared_now(hashes, hits))

    def publish(self, holding: Holding, hashes: Items[int]) -> None:
        """The sequence has computed the prefix units of `hashes`: those that nobody cached yet become shared."""
        units, unit, shared = self._units, self.unit, holding.shared
        mine = hashes[len(shared) :]
        fresh = dict.fromkeys(mine, 1)
        if len(fresh) == len(mine) and units.keys().isdisjoint(fresh):
            units.update(fresh)
            shared.extend(mine)
            holding.private -= unit * len(mine)
            return
        for key in mine:
            # Computed twice at the same time: the second copy stays private, and so does what follows it.
            if key in units:
                break
            units[key] = 1
            shared.append(key)
            holding.private -= unit

    def grow(self, blocks: int) -> None:
        """Sequences take further blocks. The caller has checked for room, and adds them to the holdings at the end."""
        self.used += blocks
        if self._idle:
            self._evict()

    def drop(self, holding: Holding) -> None:
        """The sequence is gone; its published prefix stays cached until the room is needed."""
        units, idle = self._units, self._idle
        released = 0
        # The tail first, so that the tail is evicted first.
        for key in reversed(holding.shared):
            count = units[key] = units[key] - 1
            if not count:
                idle[key] = None
                released += 1
        self.used -= holding.private + released * self.unit

    def _evict(self) -> None:
        units, idle = self._units, self._idle
        over = self.used + self.unit * len(idle) - self.total
        if over > 0:
            pop = idle.popitem
            for _ in range(min(len(idle), -(-over // self.unit))):
                del units[pop(False)[0]]
