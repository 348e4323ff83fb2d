"""Hand-offs of the reference engine: what a prefill worker holds, and how a decode worker fetches it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke.engine.reference_kv import KINDS, LAYERS, kv_words
from twostroke.engine.reference_model import block_words
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence
from twostroke.engine.reference_step import publish_full_blocks
from twostroke.errors import InvalidRequestError, KvCorruptError
from twostroke.kv.shm import WORD_BYTES, Hold, PeerSegment, Words
from twostroke.v1.kv_pb2 import Handoff, ShmTransfer


@dataclass(frozen=True, slots=True)
class _Offer:
    hold: Hold
    expires_s: float


class Holds:
    """The hand-offs that wait to be fetched. Each ends by `release`, by the reader's word or by its lease."""

    def __init__(
        self, pool: BlockPool, *, worker_id: str, epoch: str, lease_s: float, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._worker_id = worker_id
        self._epoch = epoch
        self._lease_s = lease_s
        self._clock = clock
        self._offers: dict[str, _Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._offers

    def offer(self, sequence: Sequence) -> Handoff:
        """Takes the prompt's blocks over from a sequence and holds them. Its other blocks stay with it."""
        pool = self._pool
        count = pool.blocks_for(sequence.prompt_tokens)
        hold = Hold(tuple(sequence.blocks[:count]), pool.next_generation())
        sequence.blocks = sequence.blocks[count:]
        pool.segment.hold(hold)
        self._offers[sequence.request_id] = _Offer(hold, self._clock() + self._lease_s)
        return Handoff(
            handoff_id=sequence.request_id,
            source_worker_id=self._worker_id,
            source_epoch=self._epoch,
            tokens=sequence.prompt_tokens,
            blocks=count,
            bytes=count * block_words(pool.block_size_tokens) * WORD_BYTES,
            lease_ms=int(self._lease_s * 1000),
            shm=ShmTransfer(segment=pool.segment.name, block_ids=hold.block_ids, hold_generation=hold.generation),
        )

    def release(self, request_id: str) -> bool:
        """Ends a hold; False when there is none."""
        offer = self._offers.pop(request_id, None)
        if offer is None:
            return False
        self._pool.segment.drop(offer.hold)
        self._pool.give_back(offer.hold.block_ids)
        return True

    def reap(self) -> None:
        """Ends the holds that were read or whose lease is over."""
        now_s = self._clock()
        over = [
            request_id
            for request_id, offer in self._offers.items()
            if now_s >= offer.expires_s or self._pool.segment.is_read(offer.hold)
        ]
        for request_id in over:
            self.release(request_id)


def check_handoff(handoff: Handoff, prompt_tokens: int, block_size_tokens: int) -> None:
    """Raises InvalidRequestError for a hand-off that cannot be this prompt's."""
    if handoff.WhichOneof("transport") != "shm":
        raise InvalidRequestError(
            f"hand-off {handoff.handoff_id} travels by {handoff.WhichOneof('transport')}; "
            "the reference engine fetches from shared memory only"
        )
    if handoff.tokens != prompt_tokens:
        raise InvalidRequestError(
            f"hand-off {handoff.handoff_id} covers {handoff.tokens} tokens, the prompt has {prompt_tokens}"
        )
    blocks = -(-prompt_tokens // block_size_tokens)
    if len(handoff.shm.block_ids) != blocks:
        raise InvalidRequestError(
            f"hand-off {handoff.handoff_id} names {len(handoff.shm.block_ids)} blocks; "
            f"{prompt_tokens} tokens fill {blocks} of {block_size_tokens}"
        )


def fetch(sequence: Sequence, handoff: Handoff, pool: BlockPool, *, verify: bool, folder: Path) -> int:
    """Copies the hand-off's blocks into those of the sequence, but for the ones that the prefix cache had.

    Returns the bytes copied. Raises KvLostError, KvCorruptError, LayoutMismatchError, InvalidRequestError; the source
    keeps its hold then.
    """
    first = sequence.fetch_from
    own = sequence.blocks[first : pool.blocks_for(sequence.prompt_tokens)]
    hold = Hold(tuple(handoff.shm.block_ids), handoff.shm.hold_generation)
    peer = PeerSegment.attach(
        handoff.shm.segment,
        epoch=handoff.source_epoch,
        block_words=block_words(pool.block_size_tokens),
        folder=folder,
    )
    with closing(peer):
        received = peer.read(hold, skip=first)
        if verify:
            _verify(received, sequence, handoff, pool.block_size_tokens)
        pool.segment.words[own] = received
        peer.acknowledge(hold)
    sequence.transferred_tokens = sequence.prompt_tokens - sequence.cached_tokens
    publish_full_blocks(sequence, first, sequence.prompt_tokens // pool.block_size_tokens, pool)
    return int(received.nbytes)


def _verify(received: Words, sequence: Sequence, handoff: Handoff, size: int) -> None:
    """Raises KvCorruptError naming the first place that differs from what the prompt's KV must be."""
    start = sequence.fetch_from * size
    expected = kv_words(sequence.digests[start : sequence.prompt_tokens])
    found = received.reshape(-1, LAYERS, KINDS, size).transpose(0, 3, 1, 2).reshape(-1, LAYERS, KINDS)
    wrong = np.argwhere(found[: len(expected)] != expected)
    if len(wrong):
        position, layer, kind = wrong[0].tolist()
        index = (start + position) // size
        raise KvCorruptError(
            f"hand-off {handoff.handoff_id} from {handoff.source_worker_id}: block {index} "
            f"({handoff.shm.block_ids[index]} of segment {handoff.shm.segment}) is corrupt at layer {layer}, "
            f"position {start + position}, {'KV'[kind]}"
        )
