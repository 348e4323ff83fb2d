"""The files that shared KV segments are: made with room for sure, locked while their owner lives."""

from __future__ import annotations

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from twostroke.errors import ConfigError, KvLostError, LayoutMismatchError


def no_room(folder: Path, size: int, blocks: int) -> ConfigError:
    """What to say when a segment does not fit."""
    return ConfigError(
        f"--reference-blocks {blocks} needs {size} bytes in {folder}, which has not so much room; "
        f"lower --reference-blocks or enlarge {folder}"
    )


def require_room(folder: Path, size: int, blocks: int) -> None:
    """Raises ConfigError unless the folder has so many bytes."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        raise ConfigError(f"the reference engine keeps KV in {folder}: {error.strerror}") from error
    if size > room.f_bavail * room.f_frsize:
        raise no_room(folder, size, blocks)


def locked_file(folder: Path) -> tuple[Path, int]:
    """A new file and its descriptor, locked until that is closed, however this process ends."""
    while True:
        path = folder / f"twostroke-{os.getuid()}-{os.getpid()}-{secrets.token_hex(4)}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        # Between these two calls another engine may take the file for a dead one's and remove it.
        with suppress(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(fd).st_nlink:
                return path, fd
        os.close(fd)


def open_live(path: Path) -> int:
    """A descriptor of a file whose owner lives. Raises KvLostError or, for another user's, LayoutMismatchError."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        raise KvLostError(f"segment {path.name} is gone; the worker that held the KV has ended") from None
    except PermissionError:
        raise LayoutMismatchError(f"segment {path.name} belongs to another user; run all workers as one") from None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return fd
    os.close(fd)
    raise KvLostError(f"the worker that held the KV in segment {path.name} is dead")
