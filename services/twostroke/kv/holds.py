"""The hold table: one word per hand-off that says whether its blocks are still held.

Readers fetch the word after the blocks, as they fetch the blocks: one-sided, so a source that is busy or stopped
answers all the same. A generation is 64 random bits, so never used twice, and release changes the word before the
blocks are given away; what was read while the word stayed the same was held.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from twostroke.errors import OverloadedError

SLOTS = 8192
WORD_BYTES = 8
TABLE_BYTES = SLOTS * WORD_BYTES


def hold_name(handoff_id: str, generation: int) -> str:
    """What ranks call one hold of a hand-off: a prompt that is computed again under its id is another one.

    It tells nobody the generation, which only those who may read the blocks know.
    """
    return f"{handoff_id}#{hashlib.blake2s(generation.to_bytes(8, 'little'), digest_size=4).hexdigest()}"


class HoldTable:
    """The words in memory that all processes of a worker share. One process writes, all may read and register it."""

    def __init__(self, path: Path) -> None:
        """Maps the file, making it when it is not there. It may be removed once all have mapped it."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, TABLE_BYTES)
            self._map = mmap.mmap(descriptor, TABLE_BYTES)
        finally:
            os.close(descriptor)
        self._words = np.frombuffer(self._map, np.uint64)
        self.address = int(self._words.ctypes.data)

    def word(self, slot: int) -> int:
        """What stands there now."""
        return int(self._words[slot])

    def set(self, slot: int, generation: int) -> None:
        """Writes a word; on x86 and ARM other processes see it whole, old or new."""
        self._words[slot] = generation


class Holds:
    """Which slots are taken, for the process that writes the table."""

    def __init__(self, table: HoldTable) -> None:
        self._table = table
        self._free = list(range(SLOTS))

    def take(self) -> tuple[int, int]:
        """A slot and its generation. Raises OverloadedError when all are taken."""
        if not self._free:
            raise OverloadedError(f"{SLOTS} hand-offs are held; release some")
        slot = self._free.pop()
        # Random, so that a hand-off's word tells nobody another one's, nor an earlier life's; 0 is no hold.
        generation = secrets.randbelow(2**64 - 1) + 1
        self._table.set(slot, generation)
        return slot, generation

    def give_back(self, slots: Iterable[int]) -> None:
        """Ends holds; call before their blocks are given away."""
        for slot in slots:
            self._table.set(slot, 0)
            self._free.append(slot)
