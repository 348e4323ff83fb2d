"""Which worker holds the KV of which prefixes: exact, fed by what the workers store and drop.

A block's hash covers everything before it, so equal hashes mean equal prefixes. Blocks that follow one another are kept
in runs; a prompt that has the last hash of a run has all of it, so a lookup touches two blocks a run and not every one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from twostroke.policy.kv_events import Applied, BlockHash, KvEvents, Removed, Stored

RUN_BLOCKS = 64
RUN_COST_BYTES = 250
BLOCK_COST_BYTES = 100
"""Measured as memory of a process; see bench/policy.py."""
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class _Feed:
    bit: int
    epoch: str = ""
    sequence: int = -1
    lost: bool = False


class _Run:
    """Consecutive blocks. full: workers that have all of them, as bits; leading: how many of the first blocks a worker
    has that has only some."""

    __slots__ = ("full", "hashes", "leading")

    def __init__(self, full: int, hashes: array[int]) -> None:
        self.full = full
        self.hashes = hashes
        self.leading: dict[int, int] | None = None


class PrefixIndex:
    """One per router and model. Not safe for several threads.

    max_bytes: of memory, about. Beyond it the runs that were longest not looked up are forgotten, which makes hits look
    shorter than they are, never longer.
    """

    def __init__(self, max_bytes: int = 192 << 20) -> None:
        self._max_bytes = max_bytes
        self._runs: dict[int, _Run] = {}
        self._order: OrderedDict[_Run, None] = OrderedDict()
        """Runs, the one that was longest not used first; the beginning of a prompt is used after its end."""
        self._feeds: dict[str, _Feed] = {}
        self._names: dict[int, str] = {}
        self._apart: dict[int, set[int]] = {}
        """By worker's bit: blocks it has although it lacks one before them in their run."""

    def __len__(self) -> int:
        """Blocks known."""
        return len(self._runs)

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Whether a block is known, of whatever worker."""
        return key(block_hash) in self._runs

    @property
    def cost_bytes(self) -> int:
        """Memory in use, about."""
        return len(self._runs) * BLOCK_COST_BYTES + len(self._order) * RUN_COST_BYTES

    def apply(self, worker: str, events: KvEvents) -> Applied:
        """Takes a batch of a worker's events."""
        feed = self._feeds.get(worker) or self._new_feed(worker)
        restarted = events.epoch != feed.epoch
        if events.snapshot or (restarted and events.sequence == 0):
            self._drop(feed.bit)
            feed.epoch, feed.lost = events.epoch, False
        elif feed.lost and not restarted:
            return Applied.WAITING
        elif restarted or events.sequence > feed.sequence + 1:
            self._drop(feed.bit)
            feed.epoch, feed.lost = events.epoch, True
            return Applied.RESYNC
        elif events.sequence <= feed.sequence:
            return Applied.OLD
        feed.sequence = events.sequence
        for change in events.changes:
            if isinstance(change, Stored):
                self._store(feed.bit, change)
            elif isinstance(change, Removed):
                for block in change.block_hashes:
                    self._remove(feed.bit, key(block))
            else:
                self._drop(feed.bit)
        self._forget()
        return Applied.YES

    def remove_worker(self, worker: str) -> None:
        """Drops all that is known of a worker that is gone."""
        if feed := self._feeds.pop(worker, None):
            self._drop(feed.bit)
            del self._names[feed.bit]

    def hits(self, block_hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        """How many of a prompt's first blocks each worker has; workers that have none are left out."""
        found: dict[str, int] = {}
        used: list[_Run] = []
        alive, position, end = 0, 0, len(block_hashes)
        while position < end:
            run = self._runs.get(key(block_hashes[position]))
            if run is None:
                break
            used.append(run)
            same = _same(run.hashes, block_hashes, position)
            leading = run.leading or {}
            if position == 0:
                alive = run.full
                for bit in leading:
                    alive |= bit
            staying = alive & run.full
            for bit, blocks in leading.items():
                if alive & bit and blocks >= same:
                    staying |= bit
            for bit in _bits(alive & ~staying):
                if blocks := position + leading.get(bit, 0):
                    found[self._names[bit]] = blocks
            alive, position = staying, position + same
            if not alive:
                break
        for bit in _bits(alive):
            found[self._names[bit]] = position
        for run in reversed(used):
            self._order.move_to_end(run)
        return found

    def _new_feed(self, worker: str) -> _Feed:
        bit = 1
        while bit in self._names:
            bit <<= 1
        self._names[bit] = worker
        self._feeds[worker] = feed = _Feed(bit)
        return feed

    def _store(self, bit: int, stored: Stored) -> None:
        parent = None if stored.parent is None else key(stored.parent)
        for block in map(key, stored.block_hashes):
            run = self._runs.get(block)
            if run is None:
                self._append(bit, block, parent)
            elif not run.full & bit:
                self._extend(bit, run, block)
            parent = block

    def _append(self, bit: int, block: int, parent: int | None) -> None:
        """A new block goes to the end of its parent's run, if that is this worker's alone, or begins a run."""
        run = None if parent is None else self._runs.get(parent)
        if (
            run is not None
            and run.hashes[-1] == parent
            and run.full == bit
            and not run.leading
            and len(run.hashes) < RUN_BLOCKS
        ):
            run.hashes.append(block)
        else:
            run = _Run(bit, array("Q", (block,)))
            self._order[run] = None
        self._runs[block] = run

    def _extend(self, bit: int, run: _Run, block: int) -> None:
        """A worker now has one more block of a run of which it lacks some."""
        leading = run.leading if run.leading is not None else {}
        have, offset = leading.get(bit, 0), run.hashes.index(block)
        if offset < have:
            return
        if offset > have:
            self._apart.setdefault(bit, set()).add(block)
            return
        have += 1
        apart = self._apart.get(bit, ())
        joined = have
        while have < len(run.hashes) and run.hashes[have] in apart:
            have += 1
        self._set_leading(bit, run, have)
        for each in run.hashes[joined:have]:
            self._discard_apart(bit, each)

    def _set_leading(self, bit: int, run: _Run, have: int) -> None:
        leading = run.leading if run.leading is not None else {}
        leading.pop(bit, None)
        run.full &= ~bit
        if have == len(run.hashes):
            run.full |= bit
        elif have:
            leading[bit] = have
        run.leading = leading or None

    def _remove(self, bit: int, block: int) -> None:
        run = self._runs.get(block)
        if run is None:
            return
        if self._discard_apart(bit, block):
            self._trim(run)
            return
        leading = run.leading if run.leading is not None else {}
        have = len(run.hashes) if run.full & bit else leading.get(bit, 0)
        offset = have - 1 if have and run.hashes[have - 1] == block else run.hashes.index(block)
        if offset >= have:
            return
        if offset + 1 < have:
            self._apart.setdefault(bit, set()).update(run.hashes[offset + 1 : have])
        self._set_leading(bit, run, offset)
        self._trim(run)

    def _discard_apart(self, bit: int, block: int) -> bool:
        apart = self._apart.get(bit)
        if apart is None or block not in apart:
            return False
        apart.discard(block)
        if not apart:
            del self._apart[bit]
        return True

    def _trim(self, run: _Run) -> None:
        """Forgets blocks at the end of a run that nobody has."""
        if run.full:
            return
        held = max(run.leading.values()) if run.leading else 0
        hashes = run.hashes
        while len(hashes) > held and not any(hashes[-1] in apart for apart in self._apart.values()):
            del self._runs[hashes.pop()]
        if not hashes:
            del self._order[run]
        for bit, have in tuple((run.leading or {}).items()):
            if have == len(hashes):
                self._set_leading(bit, run, have)

    def _drop(self, bit: int) -> None:
        """All of one worker: looks at every run, some milliseconds for a million blocks."""
        self._apart.pop(bit, None)
        for run in tuple(self._order):
            if run.full & bit or (run.leading and bit in run.leading):
                self._set_leading(bit, run, 0)
            self._trim(run)

    def _forget(self) -> None:
        while self.cost_bytes > self._max_bytes:
            run, _ = self._order.popitem(last=False)
            for block in run.hashes:
                del self._runs[block]
                for apart in self._apart.values():
                    apart.discard(block)


def key(block_hash: BlockHash) -> int:
    """The 64 bits by which a block is known here: enough to guess where a prompt's KV is, and never to read it."""
    return block_hash & _MASK if isinstance(block_hash, int) else int.from_bytes(block_hash[-8:], "big")


def _same(run: array[int], block_hashes: Sequence[BlockHash], position: int) -> int:
    """How many blocks of a run equal a prompt's from a position on, of which the first is known to."""
    most = min(len(run), len(block_hashes) - position)
    if run[most - 1] == key(block_hashes[position + most - 1]):
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == key(block_hashes[position + middle - 1]):
            low = middle
        else:
            high = middle - 1
    return low


def _bits(mask: int) -> Iterable[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
