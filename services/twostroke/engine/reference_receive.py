"""How a decode worker of the reference engine gets a prompt's KV: chunk by chunk, while prefill still computes.

A read is a copy within one call, so none is ever under way while anything else happens: blocks that a sequence gives up
are not written to any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke.engine.base import LinkReport
from twostroke.engine.fault_plan import FaultPlan
from twostroke.engine.reference_kv import KINDS, LAYERS, kv_words
from twostroke.engine.reference_model import block_words
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence
from twostroke.engine.reference_step import publish_full_blocks
from twostroke.errors import KvCorruptError, KvLostError, WorkerLostError
from twostroke.kv.shm import Hold, PeerSegment, Words
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint


@dataclass(slots=True)
class _Reception:
    """One hand-off on its way."""

    handoff: Handoff
    peer: PeerSegment
    hold: Hold
    read: int
    """Leading blocks that are here."""
    moved_s: float
    """When the last of them came."""
    reads: int = 0


class Inbox:
    """The hand-offs that this engine fetches. stall_s: how long the next block of one may take."""

    def __init__(
        self,
        pool: BlockPool,
        faults: FaultPlan,
        *,
        clock: Callable[[], float],
        stall_s: float,
        verify: bool,
        folder: Path,
    ) -> None:
        self.received_bytes = 0
        self.received_handoffs = 0
        self._pool = pool
        self._faults = faults
        self._clock = clock
        self._stall_s = stall_s
        self._verify = verify
        self._folder = folder
        self._receptions: dict[Sequence, _Reception] = {}

    def poll(self, sequence: Sequence, handoff: Handoff) -> None:
        """Reads what is ready into the blocks of a sequence, and ends its hand-off when nothing is missing.

        Raises KvLostError (the source's hold, epoch or process is over, or nothing came for stall_s), KvCorruptError,
        LayoutMismatchError, InvalidRequestError; the source keeps its hold then.
        """
        reception = self._receptions.get(sequence) or self._attach(sequence, handoff)
        reception.peer.check_owner()
        ready, first_token = reception.peer.progress(reception.hold)
        if ready > reception.read:
            self._read(sequence, reception, ready)
        if ready == len(reception.hold.block_ids) and first_token is not None:
            self._complete(sequence, reception, first_token)
        elif (waited_s := self._clock() - reception.moved_s) >= self._stall_s:
            raise KvLostError(
                f"no KV of hand-off {handoff.handoff_id} came from {handoff.source_worker_id} for {waited_s:.1f} s; "
                f"{reception.read} of {len(reception.hold.block_ids)} blocks had arrived (--kv-stall-s)"
            )

    def drop(self, sequence: Sequence) -> None:
        """Reads nothing more for a sequence."""
        if reception := self._receptions.pop(sequence, None):
            reception.peer.close()

    def close(self) -> None:
        """Detaches from everything."""
        for sequence in list(self._receptions):
            self.drop(sequence)

    def _attach(self, sequence: Sequence, handoff: Handoff) -> _Reception:
        if self._faults.cuts(handoff.source_worker_id):
            raise KvLostError(f"the fault plan cuts the link from {handoff.source_worker_id}")
        peer = PeerSegment.attach(
            handoff.shm.segment,
            epoch=handoff.source_epoch,
            block_words=block_words(self._pool.block_size_tokens),
            folder=self._folder,
        )
        hold = Hold(tuple(handoff.shm.block_ids), handoff.shm.hold_generation)
        reception = _Reception(handoff, peer, hold, sequence.fetch_from, self._clock())
        self._receptions[sequence] = reception
        return reception

    def _read(self, sequence: Sequence, reception: _Reception, ready: int) -> None:
        received = reception.peer.read(reception.hold, reception.read, ready)
        if self._verify:
            _verify(received, sequence, reception, self._pool.block_size_tokens)
        self._pool.segment.words[sequence.blocks[reception.read : ready]] = received
        self.received_bytes += received.nbytes
        reception.read = ready
        reception.reads += 1
        reception.moved_s = self._clock()

    def _complete(self, sequence: Sequence, reception: _Reception, first_token: int) -> None:
        reception.peer.acknowledge(reception.hold)
        self.received_handoffs += 1
        self.drop(sequence)
        full = sequence.prompt_tokens // self._pool.block_size_tokens
        publish_full_blocks(sequence, sequence.fetch_from, full, self._pool)
        sequence.received(first_token if reception.handoff.in_progress else None, reception.reads)


def probe(endpoint: KvEndpoint, epoch: str, block_size_tokens: int, folder: Path) -> LinkReport:
    """Reads the pattern in another engine's segment: a word for the latency, all to compare, all again for the rate.

    Raises KvCorruptError, LayoutMismatchError, InvalidRequestError, and WorkerLostError when the owner is gone.
    """
    name = endpoint.addresses[0].decode(errors="replace") if endpoint.addresses else ""
    try:
        peer = PeerSegment.attach(name, epoch=epoch, block_words=block_words(block_size_tokens), folder=folder)
    except KvLostError as error:
        raise WorkerLostError(error.message) from error
    with closing(peer):
        begin_s = time.perf_counter()
        int(peer.pattern[0])
        touched_s = time.perf_counter()
        peer.probe(epoch)
        compared_s = time.perf_counter()
        read_bytes = peer.pattern.copy().nbytes
        took_s = time.perf_counter() - compared_s
    return LinkReport(lanes=("shm/mmap",), bytes_per_s=read_bytes / took_s, latency_ms=(touched_s - begin_s) * 1e3)


def _verify(received: Words, sequence: Sequence, reception: _Reception, size: int) -> None:
    """Raises KvCorruptError naming the first place that differs from what the prompt's KV must be."""
    start = reception.read * size
    expected = kv_words(sequence.digests[start : min(sequence.prompt_tokens, start + len(received) * size)])
    found = received.reshape(-1, LAYERS, KINDS, size).transpose(0, 3, 1, 2).reshape(-1, LAYERS, KINDS)
    wrong = np.argwhere(found[: len(expected)] != expected)
    if len(wrong):
        position, layer, kind = wrong[0].tolist()
        index = (start + position) // size
        handoff = reception.handoff
        raise KvCorruptError(
            f"hand-off {handoff.handoff_id} from {handoff.source_worker_id}: block {index} "
            f"({handoff.shm.block_ids[index]} of segment {handoff.shm.segment}) is corrupt at layer {layer}, "
            f"position {start + position}, {'KV'[kind]}"
        )
