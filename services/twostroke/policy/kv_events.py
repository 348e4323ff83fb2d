"""What workers tell about their KV blocks, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

BlockHash = bytes | int


@dataclass(frozen=True, slots=True)
class Stored:
    """Full blocks that a worker now has, each the parent of the next. parent: what the first follows; None for the
    start of a prompt."""

    block_hashes: Sequence[BlockHash]
    parent: BlockHash | None = None


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks that a worker no longer has."""

    block_hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class Cleared:
    """A worker dropped all its blocks."""


Change = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KvEvents:
    """What happened to a worker's blocks, in order.

    sequence: one more than that of the batch before, and of a snapshot that of the last change in it; a worker's first
        after its start is 0.
    snapshot: the changes are all that the worker holds now; what was known is dropped.
    """

    epoch: str
    sequence: int
    changes: Sequence[Change] = ()
    snapshot: bool = False


class Applied(Enum):
    """What became of a batch of events."""

    YES = "yes"
    OLD = "old"
    """Known already; ignored."""
    RESYNC = "resync"
    """Something was missed. The worker counts as holding nothing until a snapshot comes: ask for one, once."""
    WAITING = "waiting"
    """Ignored until the snapshot that was asked for comes."""
