"""What the processes of one worker tell each other about hand-offs, outside vLLM's own channels.

vLLM passes news between its processes once per engine step. A step can take a second, and there is none while nothing
computes; these notes arrive at once.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

MAIN, CORE = "main", "core"
MAX_NOTE_BYTES = 200_000
"""Below Linux's default limit of a datagram."""


def rank_name(rank: int) -> str:
    """The mailbox of a rank."""
    return f"rank-{rank}"


class Note(msgspec.Struct, tag=True):
    """Any of the following."""


class Offer(Note):
    """Core to ranks: a hand-off begins. hold: its name (hold_name), also in the notes that follow."""

    hold: str


class Finish(Note):
    """Core to ranks: its prompt is done."""

    hold: str
    blocks: int
    first_token_id: int


class Withdraw(Note):
    """Core to ranks: it is not held any more."""

    hold: str
    reason: str


class Withdrawn(Note):
    """Core to main: a hand-off is not held any more."""

    handoff_id: str


class Expect(Note):
    """Core to ranks: a request waits for a hand-off, a serialized Handoff."""

    request_id: str
    handoff: bytes


class Begin(Note):
    """Core to ranks: there is room for it. first: index in the prompt of the first block."""

    request_id: str
    first: int
    block_ids: list[int]


class Skip(Note):
    """Core to ranks: it is here already."""

    request_id: str


class Cancel(Note):
    """Core to ranks: nobody waits any more."""

    request_id: str


class Renewed(Note):
    """Rank to core: a reader still wants it."""

    hold: str


class Read(Note):
    """Rank to core: its readers have read this rank's part."""

    rank: int
    hold: str


class Ended(Note):
    """Rank to core: a receive is over on this rank."""

    rank: int
    request_id: str
    first_token_id: int | None
    nbytes: int
    duration_s: float
    failure: str | None
    corrupt: bool
    missing: list[int]
    unusable: bool
    """The missing blocks may still be written, for good."""
    chunks: int = 0


class Broken(Note):
    """Rank to core: its transfer thread has ended, and nothing moves any more."""

    reason: str


class Started(Note):
    """Core to main: the first step that runs a prompt is about to begin."""

    request_id: str
    slot: int
    generation: int


class Failed(Note):
    """Core to main: a request cannot get its KV."""

    request_id: str
    reason: str
    corrupt: bool


class Recomputed(Note):
    """Core to main: a request computes these prompt tokens itself, since they did not arrive."""

    request_id: str
    tokens: int
    reason: str


class Received(Note):
    """Core to main: a request's KV is here."""

    request_id: str
    chunks: int


class Release(Note):
    """Main to core: nobody will read these."""

    handoff_ids: list[str]


class Probe(Note):
    """Main to a rank: try a link. endpoint: a serialized KvEndpoint."""

    number: int
    source: str
    endpoint: bytes


class Probed(Note):
    """Rank to main: how it went. error: of a failed one, its reason and its message."""

    number: int
    rank: int
    lanes: list[str]
    rdma: bool
    bytes_per_s: float
    latency_ms: float
    error: tuple[str, str] | None


class DropPeer(Note):
    """Main to ranks: all names that begin so have ended."""

    prefix: str


_NOTES = (
    Offer | Finish | Withdraw | Withdrawn | Expect | Begin | Skip | Cancel | Renewed | Read | Ended | Broken
    | Started | Failed | Recomputed | Received | Release | Probe | Probed | DropPeer
)  # fmt: skip


class Mailbox:
    """One process's place to get notes, named within the folder that the family shares."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._decoder = msgspec.msgpack.Decoder(_NOTES)
        self._encode = msgspec.msgpack.Encoder().encode
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(folder / name))

    def send(self, name: str, note: Note) -> None:
        """Waits while the receiver's queue is full. A process that is gone takes no notes, and the family goes with
        it."""
        try:
            self.socket.sendto(self._encode(note), str(self._folder / name))
        except (FileNotFoundError, ConnectionRefusedError):
            return

    def take(self) -> Any:
        """The next note; waits for it when the socket is a blocking one."""
        return self._decoder.decode(self.socket.recv(MAX_NOTE_BYTES))

    def listen(self, hear: Callable[[Any], None], name: str) -> None:
        """Calls hear with every note, in a thread of its own."""

        def run() -> None:
            while True:
                hear(self.take())

        threading.Thread(target=run, name=name, daemon=True).start()
