"""The offering end of hand-offs: tells readers which blocks are ready, and what they must look like.

Used by one thread, the transfer thread. It decides nothing about memory: whoever holds the blocks says what to offer
and when it is over.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from twostroke.kv.callbacks import DigestOf, Send
from twostroke.kv.digest import digest
from twostroke.kv.memory import Blocks, can_cut, pieces
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import (
    KvSlice,
    TransferDigest,
    TransferFinal,
    TransferGone,
    TransferHeld,
    TransferReady,
    TransferSignal,
    TransferTicket,
)

log = logging.getLogger(__name__)

CHUNK_TOKENS, LEAST_PIECE_TOKENS = 8192, 4
"""A chunk's digests must fit one signal, also where a reader cuts it into the smallest pieces."""

DEVICE_POLL_S = 0.0005
REMEMBERED = 4096


@dataclass(slots=True)
class _Chunk:
    blocks: Blocks
    is_written: Callable[[], bool] | None
    """Whether the device has written it; None when it has."""
    digests: dict[tuple[int, int, int], list[bytes]] = field(default_factory=dict)
    """By the way of cutting."""


@dataclass(slots=True)
class _Ticket:
    """What one reader was told."""

    cut: KvSlice | None
    readers: int
    chunks: int = 0
    digests: int = 0
    final: bool = False


@dataclass(slots=True)
class _Offer:
    chunks: list[_Chunk] = field(default_factory=list)
    tickets: dict[str, _Ticket] = field(default_factory=dict)
    final: TransferFinal | None = None
    done: set[str] = field(default_factory=set)


class Source:
    """All offers of one rank. Their ids are names of holds (hold_name), which are never used again.

    renewed and done are told ids of hand-offs: a reader still wants it; all its readers have read it. verify: digests
    are sent of every so manieth piece of a chunk, from the first; 0 is of none. digest_of: for memory that this process
    cannot look at by itself.
    """

    def __init__(
        self,
        memory: KvMemory,
        send: Send,
        renewed: Callable[[str], None],
        done: Callable[[str], None],
        *,
        verify: int,
        digest_of: DigestOf = digest,
    ) -> None:
        self._memory = memory
        self._send = send
        self._renewed = renewed
        self._done = done
        self._verify = verify
        self._digest_of = digest_of
        self._offers: dict[str, _Offer] = {}
        self._over: deque[str] = deque(maxlen=REMEMBERED)
        self._early: deque[tuple[str, TransferTicket]] = deque(maxlen=REMEMBERED)
        """Tickets of hand-offs that readers heard of sooner than this thread."""

    def offer(self, handoff_id: str) -> None:
        """Begins a hand-off, unless it has begun or is over already. Its blocks follow."""
        if handoff_id in self._offers or handoff_id in self._over:
            return
        self._offers[handoff_id] = _Offer()
        for reader, message in [early for early in self._early if early[1].handoff_id == handoff_id]:
            self._early.remove((reader, message))
            self.ticket(reader, message)

    def announce(self, handoff_id: str, blocks: Blocks, is_written: Callable[[], bool] | None = None) -> None:
        """More blocks are ready, or will be when is_written says so; ignored for hand-offs that are over.

        The news that a hand-off begins takes another way than this and may be later.
        """
        if handoff_id not in self._offers:
            self.offer(handoff_id)
        offer = self._offers.get(handoff_id)
        if offer is None:
            return
        size = max(1, CHUNK_TOKENS // max(LEAST_PIECE_TOKENS, self._memory.block_tokens))
        for start in range(0, len(blocks.ids), size):
            part = Blocks(blocks.first + start, blocks.ids[start : start + size])
            offer.chunks.append(_Chunk(part, is_written))
        self._tell(handoff_id, offer)

    def finish(self, handoff_id: str, blocks: int, first_token_id: int) -> None:
        """All blocks were announced, and this is the first token of the answer."""
        offer = self._offers.get(handoff_id)
        if offer is not None:
            offer.final = TransferFinal(handoff_id=handoff_id, blocks=blocks, first_token_id=first_token_id)
            self._tell(handoff_id, offer)

    def withdraw(self, handoff_id: str, reason: str) -> None:
        """The blocks are not held any more."""
        offer = self._offers.pop(handoff_id, None)
        self._over.append(handoff_id)
        if offer is not None:
            for reader in offer.tickets.keys() - offer.done:
                self._gone(reader, handoff_id, reason)

    def hello(self, reader: str) -> None:
        """A reader connected anew: what it was told before is forgotten."""
        for offer in self._offers.values():
            offer.tickets.pop(reader, None)
        self._early = deque((early for early in self._early if early[0] != reader), maxlen=REMEMBERED)

    def ticket(self, reader: str, message: TransferTicket) -> None:
        """A reader wants a hand-off, or still does."""
        offer = self._offers.get(message.handoff_id)
        if offer is None and message.handoff_id in self._over:
            self._gone(reader, message.handoff_id, "it is not held any more")
            return
        cut = message.slice if message.HasField("slice") else None
        least = min(LEAST_PIECE_TOKENS, self._memory.block_tokens)
        if cut is not None and (cut.piece_tokens < least or not can_cut(self._memory, cut)):
            self._gone(reader, message.handoff_id, f"its blocks cannot be cut so: {str(cut).split()}")
            return
        self._send(reader, TransferSignal(held=TransferHeld(handoff_id=message.handoff_id)))
        if offer is None:
            if (reader, message) not in self._early:
                self._early.append((reader, message))
            return
        # Told anew each time: a reader that asks again has not got everything, and knows what it has.
        offer.tickets[reader] = _Ticket(cut, max(1, message.readers))
        self._renewed(message.handoff_id)
        self._tell(message.handoff_id, offer)

    def read(self, reader: str, handoff_id: str) -> None:
        """A reader has everything."""
        offer = self._offers.get(handoff_id)
        if offer is None or reader not in offer.tickets:
            return
        offer.done.add(reader)
        if len(offer.done) >= offer.tickets[reader].readers:
            del self._offers[handoff_id]
            self._over.append(handoff_id)
            self._done(handoff_id)

    def work(self) -> float:
        """Computes the digests of one chunk, and looks at chunks that the device still writes. Returns the seconds
        after which there is more to do, infinity for nothing."""
        for handoff_id, offer in self._offers.items():
            for reader, ticket in offer.tickets.items():
                if ticket.digests < ticket.chunks and self._verify:
                    self._send_digests(handoff_id, offer, reader, ticket)
                    return 0.0
        wait_s = math.inf
        for handoff_id, offer in self._offers.items():
            if any(chunk.is_written is not None for chunk in offer.chunks):
                wait_s = DEVICE_POLL_S
                self._tell(handoff_id, offer)
        return wait_s

    def _tell(self, handoff_id: str, offer: _Offer) -> None:
        for chunk in offer.chunks:
            if chunk.is_written is not None and chunk.is_written():
                chunk.is_written = None
        for reader, ticket in offer.tickets.items():
            while ticket.chunks < len(offer.chunks) and offer.chunks[ticket.chunks].is_written is None:
                blocks = offer.chunks[ticket.chunks].blocks
                ready = TransferReady(
                    handoff_id=handoff_id,
                    chunk=ticket.chunks,
                    first_block=blocks.first,
                    block_ids=blocks.ids,
                    digests_follow=bool(self._verify),
                )
                self._send(reader, TransferSignal(ready=ready))
                ticket.chunks += 1
            if offer.final is not None and ticket.chunks == len(offer.chunks) and not ticket.final:
                self._send(reader, TransferSignal(final=offer.final))
                ticket.final = True

    def _send_digests(self, handoff_id: str, offer: _Offer, reader: str, ticket: _Ticket) -> None:
        chunk, cut = offer.chunks[ticket.digests], ticket.cut
        key = (cut.piece_tokens, cut.first_head, cut.heads) if cut is not None else (0, 0, 0)
        if key not in chunk.digests:
            size = self._memory.block_tokens
            tokens = chunk.blocks.first * size, chunk.blocks.end * size
            chunk.digests[key] = [
                b"" if number % self._verify else self._digest_of(piece)
                for number, piece in enumerate(pieces(self._memory, chunk.blocks, cut, tokens))
            ]
        digests = TransferDigest(handoff_id=handoff_id, chunk=ticket.digests, digests=chunk.digests[key])
        self._send(reader, TransferSignal(digest=digests))
        ticket.digests += 1

    def _gone(self, reader: str, handoff_id: str, reason: str) -> None:
        self._send(reader, TransferSignal(gone=TransferGone(handoff_id=handoff_id, reason=reason)))
