"""KV blocks of one worker: what sequences hold, and the prefixes that stay cached in what they do not."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

_FEW = 1024


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

    __slots__ = ("_cold", "_cold_units", "_drops", "_idle", "_units", "total", "unit", "used")

    def __init__(self, total: int, unit: int) -> None:
        self.total = total
        self.unit = unit
        self.used = 0
        self._units: dict[int, int] = {}
        """Cached units, and how many sequences refer to each; where none does, the number of the last one's drop."""
        self._idle = 0
        """How many of them none refers to."""
        self._cold: deque[tuple[int, list[int]]] = deque()
        """(number of the drop, its units) in order. What was used or evicted since is there still, and passed over."""
        self._cold_units = 0
        self._drops = 0
        """Counted downwards, so that none is mistaken for a number of sequences."""

    @property
    def free(self) -> int:
        """Blocks that sequences may still take."""
        return self.total - self.used

    @property
    def spare(self) -> int:
        """Blocks that neither a sequence nor a cached prefix has."""
        return self.total - self.used - self.unit * self._idle

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
        return sum(1 for key in hashes[:hits] if units[key] > 0)

    def take(self, hashes: Items[int], hits: int, blocks: int) -> Holding:
        """Holds `blocks` blocks, the first `hits` units of them from the cache. The caller has checked for room."""
        units = self._units
        private = blocks - hits * self.unit
        shared = list(hashes[:hits])
        woken = 0
        for key in shared:
            count = units[key]
            if count > 0:
                units[key] = count + 1
            else:
                units[key] = 1
                woken += 1
        self._idle -= woken
        self.used += private + woken * self.unit
        if self._idle:
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
        units, keys = self._units, holding.shared
        self._drops = drop = self._drops - 1
        released = 0
        for key in keys:
            count = units[key]
            if count == 1:
                units[key] = drop
                released += 1
            else:
                units[key] = count - 1
        self.used -= holding.private + released * self.unit
        if released:
            self._idle += released
            self._cold.append((drop, keys))
            self._cold_units += len(keys)
            if self._cold_units > 4 * len(units) + _FEW:
                self._forget_passed()

    def _evict(self) -> None:
        over = self.used + self.unit * self._idle - self.total
        if over <= 0:
            return
        units, cold = self._units, self._cold
        left = min(self._idle, -(-over // self.unit))
        self._idle -= left
        while left:
            drop, keys = cold[0]
            before = len(keys)
            # The tail first.
            while keys and left:
                key = keys.pop()
                if units.get(key) == drop:
                    del units[key]
                    left -= 1
            self._cold_units -= before - len(keys)
            if not keys:
                cold.popleft()

    def _forget_passed(self) -> None:
        units = self._units
        kept = [(drop, [key for key in keys if units.get(key) == drop]) for drop, keys in self._cold]
        self._cold = deque([entry for entry in kept if entry[1]])
        self._cold_units = self._idle
