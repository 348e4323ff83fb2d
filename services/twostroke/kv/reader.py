"""The reading end of hand-offs: fetches what sources announce, checks it, and says when a prompt is here.

Used by one thread, the transfer thread. Every wait has an end: a source that has not been heard of for timeout_s is
given up, and every read has a deadline of its own. Nothing is reported over, well or ill, while a read may still write
into the request's blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twostroke.kv.holds import WORD_BYTES
from twostroke.kv.memory import Blocks
from twostroke.kv.receive import Chunk, Part, Receive
from twostroke.kv.source import Send
from twostroke.kv.transport import Quarantine, Rows
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import (
    TransferDigest,
    TransferDone,
    TransferFinal,
    TransferGone,
    TransferReady,
    TransferSignal,
    TransferTicket,
)

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""Connections tried per request."""
SLOWEST_BYTES_PER_S = 100e6
"""Below this a read is given up; with timeout_s on top."""
SCRATCH_WORDS = 1024


class Fetch(Protocol):
    """Posts a read of rows from a source, by name. `over` is called when it is complete, with a message when it was
    refused; it is not called when the source is lost, which `Reader.lost` tells. Returns False when the source is not
    connected; nothing was posted then."""

    def __call__(self, source: str, rows: Rows, deadline_s: float, over: Callable[[str | None], None], /) -> bool: ...


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a receive ended."""

    request_id: str
    handoff_id: str
    first_token_id: int | None
    """None when the source did not come to say."""
    nbytes: int = 0
    duration_s: float = 0.0
    failure: str | None = None
    corrupt: bool = False
    missing: Sequence[int] = ()
    """Blocks that did not arrive whole and verified."""
    quarantine: tuple[tuple[int, int], ...] = ()
    """Memory that must never be used again."""


class Reader:
    """All receives of one rank.

    connect makes sure that there is, or will be, a connection to a source by name. done is told outcomes. scratch:
    numpy array of SCRATCH_WORDS words, registered. clock: monotonic seconds.
    """

    def __init__(
        self,
        memory: KvMemory,
        scratch: np.ndarray[tuple[int], np.dtype[np.uint64]],
        connect: Callable[[str], None],
        send: Send,
        fetch: Fetch,
        done: Callable[[Outcome], None],
        clock: Callable[[], float],
        *,
        timeout_s: float,
        readers: int = 1,
        verify: bool = True,
    ) -> None:
        self._memory = memory
        self._scratch = scratch
        self._free_words = list(range(SCRATCH_WORDS))
        self._connect = connect
        self._send = send
        self._fetch = fetch
        self._done = done
        self._clock = clock
        self._timeout_s = timeout_s
        self._readers = readers
        self._verify = verify
        self._receives: dict[str, Receive] = {}
        self._heard_s: dict[str, float] = {}
        self._asked_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._receives)

    def expect(self, receive: Receive) -> None:
        """Asks the sources for a hand-off, before there is room for it. Asking twice is asking once."""
        if receive.request_id not in self._receives:
            self._receives[receive.request_id] = receive
            for part in receive.parts:
                self._heard_s.setdefault(part.source, self._clock())
                self._ask(receive, part)

    def begin(self, request_id: str, here: Blocks) -> None:
        """There is room now; what is ready is fetched. Unknown ids are ignored."""
        receive = self._receives.get(request_id)
        if receive is not None:
            receive.here = here
            self._advance(receive)

    def cancel(self, request_id: str) -> None:
        """Gives a receive up. Its outcome comes when no read can write any more, at once when none is in flight."""
        receive = self._receives.get(request_id)
        if receive is not None:
            self._fail(receive, "cancelled")

    def ready(self, source: str, message: TransferReady) -> None:
        """A chunk can be read."""
        for receive, part in self._parts(source, message.handoff_id):
            if message.chunk not in part.chunks:
                blocks = Blocks(message.first_block, list(message.block_ids))
                verified = not (message.digests_follow and self._verify)
                part.chunks[message.chunk] = Chunk(blocks, verified)
            self._advance(receive)

    def digests(self, source: str, message: TransferDigest) -> None:
        """What a chunk must look like."""
        for receive, part in self._parts(source, message.handoff_id):
            chunk = part.chunks.get(message.chunk)
            if chunk is not None:
                chunk.digests = list(message.digests)
            self._advance(receive)

    def final(self, source: str, message: TransferFinal) -> None:
        """The source has told everything."""
        for receive, part in self._parts(source, message.handoff_id):
            part.final = message
            self._advance(receive)

    def gone(self, source: str, message: TransferGone) -> None:
        """The source does not hold it any more."""
        for receive, _ in self._parts(source, message.handoff_id):
            self._fail(receive, f"{source} gave it up: {message.reason}")

    def held(self, source: str) -> None:
        """The source lives."""
        self._heard_s[source] = self._clock()

    def lost(self, source: str, message: str, quarantine: Quarantine | None, *, again: bool) -> None:
        """The connection is gone and fenced. again: a new one is worth a try."""
        self._heard_s.pop(source, None)
        for receive in list(self._receives.values()):
            parts = [part for part in receive.parts if part.source == source and not part.complete]
            if not parts:
                continue
            receive.quarantine += quarantine.ranges if quarantine is not None else ()
            for part in parts:
                part.restart()
            if not again or receive.attempts >= ATTEMPTS or receive.failure or quarantine:
                self._fail(receive, message)
                continue
            log.warning("hand-off %s: %s; asking again", receive.handoff_id, message)
            receive.attempts += 1
            self._heard_s[source] = self._clock()
            for part in parts:
                self._ask(receive, part)

    def tick(self) -> list[tuple[str, str]]:
        """Renews what is waited for. Returns the sources that have been silent for too long, and what to say of them;
        the caller fences them and calls `lost`."""
        now_s = self._clock()
        silent: dict[str, str] = {}
        for receive in self._receives.values():
            for part in receive.parts:
                if part.complete or receive.failure:
                    continue
                if now_s - self._heard_s.setdefault(part.source, now_s) > self._timeout_s:
                    silent[part.source] = f"{part.source} has not answered for {self._timeout_s:g} s (--kv-stall-s)"
                elif now_s - self._asked_s.get(receive.request_id, 0.0) > self._timeout_s / 4:
                    self._ask(receive, part)
        return list(silent.items())

    def _parts(self, source: str, handoff_id: str) -> list[tuple[Receive, Part]]:
        self._heard_s[source] = self._clock()
        return [
            (receive, part)
            for receive in list(self._receives.values())
            if receive.handoff_id == handoff_id and not receive.failure
            for part in receive.parts
            if part.source == source and not part.complete
        ]

    def _ask(self, receive: Receive, part: Part) -> None:
        self._asked_s[receive.request_id] = self._clock()
        self._connect(part.source)
        ticket = TransferTicket(handoff_id=receive.handoff_id, readers=self._readers, slice=part.cut)
        self._send(part.source, TransferSignal(ticket=ticket))

    def _advance(self, receive: Receive) -> None:
        if receive.here is None or receive.failure:
            return
        for part in receive.parts:
            for chunk in part.chunks.values():
                if not chunk.posted and not receive.failure:
                    self._read(receive, part, chunk)
                if chunk.arrived and not chunk.verified and chunk.digests is not None:
                    chunk.verified = receive.verify(self._memory, part, chunk)
                    if not chunk.verified:
                        receive.corrupt = True
                        self._fail(receive, f"what arrived from {part.source} is not what it has")
                        return
            if not receive.failure and not part.checking and not part.complete and part.announced():
                self._check_hold(receive, part)

    def _read(self, receive: Receive, part: Part, chunk: Chunk) -> None:
        chunk.posted = True
        rows = receive.plan(self._memory, part, chunk)
        if not len(rows):
            chunk.arrived = chunk.verified = True
            return
        nbytes = int(rows[:, 2].sum())

        def over(refused: str | None) -> None:
            part.in_flight -= 1
            receive.failure = receive.failure or refused
            if refused is None:
                chunk.arrived = True
                receive.nbytes += nbytes
            self._settle_or_advance(receive)

        deadline_s = self._timeout_s + nbytes / SLOWEST_BYTES_PER_S
        part.in_flight += 1
        if not self._fetch(part.source, rows, deadline_s, over):
            part.in_flight -= 1
            chunk.posted = False

    def _check_hold(self, receive: Receive, part: Part) -> None:
        """Everything is here; it counts if it was held all the time."""
        part.checking = True
        word = self._free_words.pop()
        target = int(self._scratch.ctypes.data) + word * WORD_BYTES
        rows = np.array([[target, part.remote.hold_table_address + receive.slot * WORD_BYTES, WORD_BYTES]], np.int64)

        def over(refused: str | None) -> None:
            part.in_flight -= 1
            found = int(self._scratch[word])
            self._free_words.append(word)
            if refused is None and found != receive.generation:
                refused = f"{part.source} gave the blocks away while they were being read"
            receive.failure = receive.failure or refused
            part.complete = refused is None
            self._settle_or_advance(receive)

        part.in_flight += 1
        if not self._fetch(part.source, rows, self._timeout_s, over):
            part.in_flight -= 1
            self._free_words.append(word)
            part.checking = False

    def _settle_or_advance(self, receive: Receive) -> None:
        if receive.failure:
            self._settle(receive)
        elif all(part.complete for part in receive.parts):
            for part in receive.parts:
                done = TransferDone(handoff_ids=[receive.handoff_id])
                self._send(part.source, TransferSignal(done=done))
            self._end(receive)
        else:
            self._advance(receive)

    def _fail(self, receive: Receive, message: str) -> None:
        receive.failure = receive.failure or message
        self._settle(receive)

    def _settle(self, receive: Receive) -> None:
        if receive.request_id in self._receives and receive.in_flight == 0:
            self._end(receive)

    def _end(self, receive: Receive) -> None:
        del self._receives[receive.request_id]
        self._asked_s.pop(receive.request_id, None)
        finals = [part.final for part in receive.parts if part.final is not None]
        self._done(
            Outcome(
                receive.request_id,
                receive.handoff_id,
                finals[0].first_token_id if finals else None,
                receive.nbytes,
                self._clock() - receive.begun_s,
                receive.failure,
                receive.corrupt,
                receive.missing(self._memory) if receive.failure else (),
                receive.quarantine,
            )
        )
