"""The reading end of hand-offs: fetches what sources announce, checks it, and says when a prompt is here.

Used by one thread, the transfer thread. Every wait has an end: a source that has not been heard of for timeout_s is
given up, and every read has a deadline of its own. Nothing is reported over, well or ill, while a read may still write
into the request's blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from twostroke.kv.callbacks import DigestOf, Fetch, Send
from twostroke.kv.digest import digest
from twostroke.kv.holds import WORD_BYTES
from twostroke.kv.memory import Blocks
from twostroke.kv.receive import Chunk, Outcome, Part, Receive
from twostroke.kv.transport import Quarantine
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
        digest_of: DigestOf = digest,
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
        self._digest_of = digest_of
        self._receives: dict[str, Receive] = {}
        self._heard_s: dict[str, float] = {}
        self._asked_s: dict[tuple[str, str], float] = {}
        """By request and source."""
        self._queued_bytes: dict[str, int] = {}
        """Of reads posted, by source; they are worked on in order."""
        self._ticked_s = clock()

    def __len__(self) -> int:
        return len(self._receives)

    def expect(self, receive: Receive) -> None:
        """Asks the sources for a hand-off, before there is room for it. Asking twice is asking once."""
        if receive.request_id not in self._receives:
            waited_for = {part.source for _, part in self._waiting()}
            self._receives[receive.request_id] = receive
            for part in receive.parts:
                if part.source not in waited_for:
                    self._heard_s[part.source] = self._clock()
                self._ask(receive, part)

    def begin(self, request_id: str, here: Blocks) -> None:
        """There is room now; what is ready is fetched. Unknown ids are ignored."""
        receive = self._receives.get(request_id)
        if receive is not None:
            receive.here = here
            self._advance(receive)

    def skip(self, request_id: str) -> None:
        """Nothing is to be fetched: the sources are told that all was read, and no outcome follows. Before `begin`."""
        receive = self._receives.pop(request_id, None)
        if receive is not None:
            self._forget_asking(receive)
            self._say_done(receive)

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
            receive.reused = True
            self._fail(receive, f"{source} gave it up: {message.reason}")

    def held(self, source: str) -> None:
        """The source lives."""
        self._heard_s[source] = self._clock()

    def lost(self, source: str, message: str, quarantine: Quarantine | None, *, again: bool) -> None:
        """The connection is gone and fenced. again: a new one is worth a try, in what is left of the source's time."""
        self._queued_bytes.pop(source, None)
        for receive in list(self._receives.values()):
            parts = [part for part in receive.parts if part.source == source and not part.complete]
            if not parts:
                continue
            for part in parts:
                if quarantine and part.in_flight:
                    receive.quarantine += quarantine.ranges
                if part.word is not None and not quarantine:
                    self._free_words.append(part.word)
                part.restart()
            receive.losses.append(message)
            if not again or len(receive.losses) >= ATTEMPTS or receive.failure or receive.quarantine:
                self._fail(receive, "; then ".join(dict.fromkeys(receive.losses)))
                continue
            log.warning("hand-off %s: %s; asking again", receive.handoff_id, message)
            for part in parts:
                self._ask(receive, part)

    def stop(self, message: str) -> None:
        """The transport is closed: ends all receives."""
        for source in {part.source for receive in self._receives.values() for part in receive.parts}:
            self.lost(source, message, None, again=False)

    def tick(self) -> list[tuple[str, str]]:
        """Renews what is waited for. Returns the sources that have been silent for too long, and what to say of them;
        the caller fences them and calls `lost`."""
        now_s = self._clock()
        away_s, self._ticked_s = now_s - self._ticked_s, now_s
        if away_s > self._timeout_s / 4:
            # This thread has not listened: a long copy, or the process was stopped. That is not their silence.
            self._heard_s = {name: min(now_s, heard_s + away_s) for name, heard_s in self._heard_s.items()}
        silent: dict[str, str] = {}
        for receive, part in self._waiting():
            if receive.failure:
                continue
            if now_s - self._heard_s.setdefault(part.source, now_s) > self._timeout_s:
                silent[part.source] = f"{part.source} has not answered for {self._timeout_s:g} s (--kv-stall-s)"
            elif now_s - self._asked_s[receive.request_id, part.source] > self._timeout_s / 4:
                self._ask(receive, part)
            if part.announced():
                self._advance(receive)
        return list(silent.items())

    def _waiting(self) -> list[tuple[Receive, Part]]:
        return [
            (receive, part)
            for receive in self._receives.values()
            for part in receive.parts
            if not part.complete and not receive.failure
        ]

    def _parts(self, source: str, handoff_id: str) -> list[tuple[Receive, Part]]:
        self._heard_s[source] = self._clock()
        return [
            (receive, part)
            for receive, part in self._waiting()
            if receive.handoff_id == handoff_id and part.source == source
        ]

    def _ask(self, receive: Receive, part: Part) -> None:
        self._asked_s[receive.request_id, part.source] = self._clock()
        self._connect(part.source)
        ticket = TransferTicket(
            handoff_id=receive.handoff_id, readers=max(1, self._readers // part.sources), slice=part.cut
        )
        self._send(part.source, TransferSignal(ticket=ticket))

    def _advance(self, receive: Receive) -> None:
        if receive.here is None or receive.failure:
            return
        for part in receive.parts:
            for chunk in part.chunks.values():
                if not chunk.posted and not receive.failure:
                    self._read(receive, part, chunk)
                if chunk.arrived and not chunk.verified and chunk.digests is not None:
                    chunk.verified = receive.verify(self._memory, part, chunk, self._digest_of)
                    if not chunk.verified:
                        receive.corrupt = True
                        self._fail(receive, f"what arrived from {part.source} is not what it has")
                        return
            if not receive.failure and part.word is None and not part.complete and part.announced():
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
            self._queued_bytes[part.source] -= nbytes
            receive.failure = receive.failure or refused
            if refused is None:
                chunk.arrived = True
                receive.nbytes += nbytes
            self._settle_or_advance(receive)

        queued_bytes = self._queued_bytes[part.source] = self._queued_bytes.get(part.source, 0) + nbytes
        part.in_flight += 1
        if not self._fetch(part.source, rows, self._timeout_s + queued_bytes / SLOWEST_BYTES_PER_S, over):
            part.in_flight -= 1
            self._queued_bytes[part.source] -= nbytes
            chunk.posted = False

    def _check_hold(self, receive: Receive, part: Part) -> None:
        """Everything is here; it counts if it was held all the time."""
        if not self._free_words:
            return  # the next tick tries again
        word = part.word = self._free_words.pop()
        target = int(self._scratch.ctypes.data) + word * WORD_BYTES
        rows = np.array([[target, part.remote.hold_table_address + receive.slot * WORD_BYTES, WORD_BYTES]], np.int64)

        def over(refused: str | None) -> None:
            part.in_flight -= 1
            part.word = None
            found = int(self._scratch[word])
            self._free_words.append(word)
            if refused is None and found != receive.generation:
                receive.reused = True
                refused = f"{part.source} gave the blocks away while they were being read"
            receive.failure = receive.failure or refused
            part.complete = refused is None
            self._settle_or_advance(receive)

        part.in_flight += 1
        queued_bytes = self._queued_bytes.get(part.source, 0)
        if not self._fetch(part.source, rows, self._timeout_s + queued_bytes / SLOWEST_BYTES_PER_S, over):
            part.in_flight -= 1
            part.word = None
            self._free_words.append(word)

    def _settle_or_advance(self, receive: Receive) -> None:
        if receive.failure:
            self._settle(receive)
        elif all(part.complete for part in receive.parts):
            if receive.is_short(self._memory):
                self._fail(receive, "the source left blocks out")
                return
            # The engine first: it can compute now, while the source only has memory to give back.
            self._end(receive)
            self._say_done(receive)
        else:
            self._advance(receive)

    def _say_done(self, receive: Receive) -> None:
        for part in receive.parts:
            done = TransferDone(handoff_ids=[receive.handoff_id])
            self._send(part.source, TransferSignal(done=done))

    def _fail(self, receive: Receive, message: str) -> None:
        receive.failure = receive.failure or message
        self._settle(receive)

    def _settle(self, receive: Receive) -> None:
        if receive.request_id in self._receives and receive.in_flight == 0:
            self._end(receive)

    def _end(self, receive: Receive) -> None:
        del self._receives[receive.request_id]
        self._forget_asking(receive)
        self._done(receive.outcome(self._memory, self._clock()))

    def _forget_asking(self, receive: Receive) -> None:
        for part in receive.parts:
            self._asked_s.pop((receive.request_id, part.source), None)
