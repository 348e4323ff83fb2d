"""KV blocks in shared memory: one segment per engine, which other processes of the same user attach by name.

A segment is a file in /dev/shm, in 64-bit words:

    header        magic, version, blocks, words per block, digest of the owner's epoch (two words); one page
    generations   one word per block: stamp of the moment its owner took it for new content
    holds         one word per block: generation of the live hold whose last block this is, else 0
    acknowledged  one word per block: generation of the hold that a reader has finished reading
    ready         one word per block: how many blocks of the hold that ends here can be read, from its first on
    first         one word per block: 1 + the token that follows the hold's prompt, 0 until it is known
    pattern       what a probe reads, made from the owner's epoch
    blocks        the KV itself

Stamps and hold generations come from one counter, so a block that was taken again after a hold began has a stamp above
the hold's generation. Every hold ends in a block of its own, which is why one word per block is enough to find it.
A hold may begin before its blocks are written; `ready` grows with them, and `first` is set before its last step.

The owner keeps the file locked. The kernel drops the lock when the owner dies, however it dies and whatever its process
id means elsewhere: readers refuse an unlocked segment, and the next engine that starts removes it.
"""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from twostroke.errors import InvalidRequestError, KvCorruptError, KvLostError, LayoutMismatchError
from twostroke.kv.shm_file import locked_file, no_room, open_live, require_room

SHM_FOLDER = Path("/dev/shm")  # noqa: S108 -- shared memory is the point
WORD_BYTES = 8

Words = NDArray[np.uint64]

_MAGIC = 0x74776F7374726B76
_VERSION = 2
_HEADER_WORDS = mmap.PAGESIZE // WORD_BYTES
_EPOCH = slice(4, 6)
_TABLES = 5
PATTERN_BYTES = 64 << 10
_PATTERN_WORDS = PATTERN_BYTES // WORD_BYTES
_NAME = re.compile(r"twostroke-\d+-\d+-[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Hold:
    """Blocks that their owner promises not to touch, in the order of the prompt."""

    block_ids: tuple[int, ...]
    generation: int


def segment_bytes(blocks: int, block_words: int) -> int:
    """Size of a segment."""
    return (_HEADER_WORDS + _PATTERN_WORDS + blocks * (_TABLES + block_words)) * WORD_BYTES


def remove_stale(folder: Path = SHM_FOLDER) -> list[str]:
    """Removes this user's segments whose owners are dead. Returns their names."""
    removed = []
    for path in folder.glob(f"twostroke-{os.getuid()}-*"):
        if not _NAME.fullmatch(path.name):
            continue
        with suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path.name)
            finally:
                os.close(fd)
    return removed


class _Mapping:
    """The words of a mapped segment, by part."""

    def __init__(self, fd: int, blocks: int, block_words: int) -> None:
        self._fd = fd
        self._map = mmap.mmap(fd, segment_bytes(blocks, block_words))
        words: Words = np.frombuffer(self._map, dtype=np.uint64)
        self.header = words[:_HEADER_WORDS]
        end = _HEADER_WORDS + _TABLES * blocks
        tables = words[_HEADER_WORDS:end].reshape(_TABLES, blocks)
        self.generations, self.holds, self.acknowledged, self.ready, self.first = tables
        self.pattern = words[end : end + _PATTERN_WORDS]
        self.words = words[end + _PATTERN_WORDS :].reshape(blocks, block_words)
        self.closed = False

    def unmap(self) -> None:
        """Gives the mapping up; memory that someone still looks at goes when they stop."""
        self.closed = True
        nothing: Words = np.empty(0, dtype=np.uint64)
        self.header = self.generations = self.holds = self.acknowledged = self.ready = self.first = nothing
        self.pattern = nothing
        self.words = nothing.reshape(0, 0)
        with suppress(BufferError):
            self._map.close()
        os.close(self._fd)


class Segment(_Mapping):
    """An engine's own blocks.

    words: shape (blocks, block_words), uint64, zero at first. All other tables have shape (blocks,).
    """

    def __init__(self, path: Path, fd: int, blocks: int, block_words: int) -> None:
        super().__init__(fd, blocks, block_words)
        self._path = path
        self.name = path.name

    @classmethod
    def create(cls, *, epoch: str, blocks: int, block_words: int, folder: Path = SHM_FOLDER) -> Segment:
        """Makes a segment whose memory is really there. Raises ConfigError when the folder has no room for it."""
        size = segment_bytes(blocks, block_words)
        require_room(folder, size, blocks)
        path, fd = locked_file(folder)
        try:
            # Without this, memory that runs out later is a SIGBUS in whoever touches it.
            os.posix_fallocate(fd, 0, size)
            segment = cls(path, fd, blocks, block_words)
        except OSError as error:
            path.unlink()
            os.close(fd)
            raise no_room(folder, size, blocks) from error
        segment.header[:4] = (_MAGIC, _VERSION, blocks, block_words)
        segment.header[_EPOCH] = _epoch_words(epoch)
        segment.pattern[:] = _pattern(epoch)
        return segment

    def hold(self, hold: Hold) -> None:
        """Lets readers in; no block can be read yet."""
        last = hold.block_ids[-1]
        self.ready[last] = self.first[last] = 0
        self.holds[last] = hold.generation

    def announce(self, hold: Hold, blocks: int, first_token: int | None = None) -> None:
        """Says that so many of the hold's blocks are written. first_token: what follows the prompt, with the last."""
        last = hold.block_ids[-1]
        if first_token is not None:
            self.first[last] = 1 + first_token
        # Readers take the token once all blocks are ready, so this comes after it.
        self.ready[last] = blocks

    def drop(self, hold: Hold) -> None:
        """Tells readers that the hold is over; to be called before any of its blocks is taken again."""
        self.holds[hold.block_ids[-1]] = 0

    def is_read(self, hold: Hold) -> bool:
        """Whether a reader has acknowledged the hold."""
        return int(self.acknowledged[hold.block_ids[-1]]) == hold.generation

    def close(self) -> None:
        """Unlinks the segment and makes it unreadable for those who have it attached; idempotent."""
        if self.closed:
            return
        self.header[_EPOCH] = 0
        self._path.unlink(missing_ok=True)
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        self.unmap()


class PeerSegment(_Mapping):
    """Another engine's blocks, for reading."""

    def __init__(self, name: str, fd: int, blocks: int, block_words: int) -> None:
        super().__init__(fd, blocks, block_words)
        self.name = name
        self._epoch: Words = np.zeros(2, dtype=np.uint64)

    @classmethod
    def attach(cls, name: str, *, epoch: str, block_words: int, folder: Path = SHM_FOLDER) -> PeerSegment:
        """Opens the segment of a live owner.

        Raises KvLostError when it is gone or its owner is, LayoutMismatchError when its blocks have another size or
        belong to another user, InvalidRequestError for a name that no segment has.
        """
        if not _NAME.fullmatch(name):
            raise InvalidRequestError(f"{name!r} is not the name of a KV segment")
        fd = open_live(folder / name)
        try:
            size = os.fstat(fd).st_size
            header = np.frombuffer(os.pread(fd, 4 * WORD_BYTES, 0), dtype=np.uint64).tolist()
            blocks = header[2] if len(header) == 4 else 0
            if header != [_MAGIC, _VERSION, blocks, block_words] or size != segment_bytes(blocks, block_words):
                raise LayoutMismatchError(
                    f"segment {name} of {size} bytes starts with {header}; "
                    f"expected [{_MAGIC}, {_VERSION}, blocks, {block_words}] and as many bytes as that takes"
                )
            peer = cls(name, fd, blocks, block_words)
        except BaseException:
            os.close(fd)
            raise
        peer._epoch = _epoch_words(epoch)
        return peer

    def check(self, hold: Hold) -> None:
        """Raises KvLostError unless the hold is live and none of its blocks was taken again."""
        if not np.array_equal(self.header[_EPOCH], self._epoch):
            raise KvLostError(f"segment {self.name} belongs to another epoch of its worker")
        if not hold.block_ids or max(hold.block_ids) >= len(self.holds):
            raise KvLostError(f"segment {self.name} has {len(self.holds)} blocks; block {hold.block_ids} is not one")
        live = int(self.holds[hold.block_ids[-1]])
        if live != hold.generation:
            raise KvLostError(f"the hold of generation {hold.generation} in segment {self.name} is over")
        stamps = self.generations[list(hold.block_ids)]
        if stamps.max() > hold.generation:
            index = int(stamps.argmax())
            raise KvLostError(
                f"block {index} ({hold.block_ids[index]} of segment {self.name}) was taken again: "
                f"generation {stamps[index]}, hold {hold.generation}"
            )

    def check_owner(self) -> None:
        """Raises KvLostError when the owner is dead."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        raise KvLostError(f"the worker that held the KV in segment {self.name} is dead")

    def progress(self, hold: Hold) -> tuple[int, int | None]:
        """How many of the hold's blocks can be read, and the token that follows the prompt once it is known.

        Raises KvLostError when the hold is over.
        """
        self.check(hold)
        last = hold.block_ids[-1]
        ready, first = int(self.ready[last]), int(self.first[last])
        self.check(hold)
        return min(ready, len(hold.block_ids)), first - 1 if first else None

    def probe(self, epoch: str) -> None:
        """Reads the pattern. Raises KvCorruptError when it is not that of the epoch."""
        if not np.array_equal(self.pattern, _pattern(epoch)):
            raise KvCorruptError(f"segment {self.name} does not show the pattern of its worker's epoch")

    def copy(self, block_ids: Sequence[int]) -> Words:
        """The blocks' words, shape (len(block_ids), block_words), unchecked."""
        return self.words[list(block_ids)]

    def read(self, hold: Hold, start: int = 0, stop: int | None = None) -> Words:
        """The hold's blocks start to stop, shape (stop - start, block_words).

        Raises KvLostError when the hold was over before the copy, or became so while it was made.
        """
        self.check(hold)
        copied = self.copy(hold.block_ids[start:stop])
        self.check(hold)
        return copied

    def acknowledge(self, hold: Hold) -> None:
        """Tells the owner that the hold has been read and may end."""
        self.acknowledged[hold.block_ids[-1]] = hold.generation

    def close(self) -> None:
        """Detaches; idempotent."""
        if not self.closed:
            self.unmap()


def _epoch_words(epoch: str) -> Words:
    return np.frombuffer(hashlib.blake2b(epoch.encode(), digest_size=16).digest(), dtype=np.uint64)


def _pattern(epoch: str) -> Words:
    # Every word differs from its neighbours, so that a page in the wrong place shows.
    steps = np.arange(_PATTERN_WORDS, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    pattern: Words = steps + _epoch_words(epoch)[0]
    return pattern
