"""What a prefill worker of the reference engine holds for decode workers: hand-offs, from their first step on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from twostroke.engine.fault_plan import Corrupt, FaultPlan
from twostroke.engine.reference_model import block_words
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence
from twostroke.errors import InvalidRequestError
from twostroke.kv.shm import WORD_BYTES, Hold
from twostroke.v1.kv_pb2 import Handoff, ShmTransfer


@dataclass(frozen=True, slots=True)
class _Early:
    """An offer whose prompt is still being computed; the blocks are the sequence's."""

    hold: Hold
    faults: list[Corrupt]

    def readable(self, computed_blocks: int) -> int:
        # The prompt's own first token is chosen from these blocks: what is to be corrupt is so only after that.
        return min([computed_blocks, *(fault.block for fault in self.faults)])


@dataclass(frozen=True, slots=True)
class _Offer:
    hold: Hold
    expires_s: float


class Holds:
    """The hand-offs on offer. One of a complete prompt ends by `release`, by the reader's word or by its lease."""

    def __init__(
        self,
        pool: BlockPool,
        faults: FaultPlan,
        *,
        worker_id: str,
        epoch: str,
        lease_s: float,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._faults = faults
        self._worker_id = worker_id
        self._epoch = epoch
        self._lease_s = lease_s
        self._clock = clock
        self._made = 0
        self._early: dict[Sequence, _Early] = {}
        self._offers: dict[str, _Offer] = {}

    def __len__(self) -> int:
        return len(self._offers)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._offers

    @property
    def blocks(self) -> int:
        """Blocks that are kept for nothing but to be fetched."""
        return sum(len(offer.hold.block_ids) for offer in self._offers.values())

    def begin(self, sequence: Sequence) -> Handoff:
        """Offers a prompt that is about to be computed. It has all its blocks; what the prefix cache had of them can be
        read at once."""
        early = self._early[sequence] = self._new(sequence)
        self.advance(sequence)
        return self._message(sequence, early.hold, in_progress=True)

    def advance(self, sequence: Sequence) -> None:
        """Lets readers have the blocks that are full."""
        if early := self._early.get(sequence):
            self._pool.segment.announce(early.hold, early.readable(sequence.computed // self._pool.block_size_tokens))

    def withdraw(self, sequence: Sequence) -> None:
        """Ends the offer of a prompt that will not be completed, before its blocks are given back."""
        if early := self._early.pop(sequence, None):
            self._pool.segment.drop(early.hold)

    def complete(self, sequence: Sequence, first_token: int) -> Handoff:
        """Takes the prompt's blocks over from a sequence and holds them. Its other blocks stay with it."""
        early = self._early.pop(sequence, None) or self._new(sequence)
        hold = early.hold
        for fault in early.faults:
            self._corrupt(hold.block_ids[min(fault.block, len(hold.block_ids) - 1)], fault.byte)
        sequence.blocks = sequence.blocks[len(hold.block_ids) :]
        self._offers[sequence.request_id] = _Offer(hold, self._clock() + self._lease_s)
        self._pool.segment.announce(hold, len(hold.block_ids), first_token)
        return self._message(sequence, hold, in_progress=False)

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

    def _new(self, sequence: Sequence) -> _Early:
        pool = self._pool
        self._made += 1
        hold = Hold(tuple(sequence.blocks[: pool.blocks_for(sequence.prompt_tokens)]), pool.next_generation())
        pool.segment.hold(hold)
        return _Early(hold, self._faults.corruptions(self._made))

    def _corrupt(self, block: int, byte: int) -> None:
        content = self._pool.segment.words[block].view(np.uint8)
        content[byte % len(content)] ^= 1
        # The fault is of this hand-off only: nobody else is to compute with the block.
        self._pool.forget(block)

    def _message(self, sequence: Sequence, hold: Hold, *, in_progress: bool) -> Handoff:
        blocks = len(hold.block_ids)
        return Handoff(
            handoff_id=sequence.request_id,
            source_worker_id=self._worker_id,
            source_epoch=self._epoch,
            tokens=sequence.prompt_tokens,
            blocks=blocks,
            bytes=blocks * block_words(self._pool.block_size_tokens) * WORD_BYTES,
            lease_ms=int(self._lease_s * 1000),
            shm=ShmTransfer(segment=self._pool.segment.name, block_ids=hold.block_ids, hold_generation=hold.generation),
            in_progress=in_progress,
        )


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
