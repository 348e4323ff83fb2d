"""What a reader knows of a hand-off that it fetches, part by part; a part is what comes from one rank of the source."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from twostroke.kv.digest import digest
from twostroke.kv.memory import Blocks, common_tokens, piece_tokens, pieces
from twostroke.kv.transport import Rows, merge_runs
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import KvSlice, TransferFinal


@dataclass(slots=True)
class Chunk:
    """Blocks that the source announced."""

    there: Blocks
    verified: bool
    """Whether its content is known to be right; from the beginning where the source sends no digests."""
    digests: list[bytes] | None = None
    posted: bool = False
    arrived: bool = False


@dataclass(slots=True)
class Part:
    """What comes from one rank of the source."""

    source: str
    """Name of the rank's transport."""
    remote: KvMemory
    cut: KvSlice | None
    chunks: dict[int, Chunk] = field(default_factory=dict)
    final: TransferFinal | None = None
    in_flight: int = 0
    """Reads that may still write."""
    checking: bool = False
    """The hold is being looked at for the last time."""
    complete: bool = False

    def restart(self) -> None:
        """Forgets what was told on a connection that is gone; what arrived and was verified is fetched no more."""
        self.chunks = {number: chunk for number, chunk in self.chunks.items() if chunk.arrived and chunk.verified}
        self.final = None
        self.checking = False
        self.in_flight = 0

    def announced(self) -> bool:
        """Whether every chunk has been told of, and all of them are here and right."""
        if self.final is None or not all(chunk.arrived and chunk.verified for chunk in self.chunks.values()):
            return False
        return sum(len(chunk.there.ids) for chunk in self.chunks.values()) >= self.final.blocks


@dataclass(slots=True)
class Receive:
    """One request's KV on its way in."""

    request_id: str
    handoff_id: str
    slot: int
    generation: int
    parts: list[Part]
    begun_s: float
    here: Blocks | None = None
    """Where it goes; None until the engine has found room."""
    attempts: int = 1
    nbytes: int = 0
    failure: str | None = None
    corrupt: bool = False
    quarantine: tuple[tuple[int, int], ...] = ()

    @property
    def in_flight(self) -> int:
        """Reads that may still write into the request's blocks."""
        return sum(part.in_flight for part in self.parts)

    def plan(self, local: KvMemory, part: Part, chunk: Chunk) -> Rows:
        """What to read for a chunk, merged; empty when all of it is here already."""
        assert self.here is not None
        tokens = common_tokens(local, self.here, part.remote, chunk.there)
        if tokens[1] <= tokens[0]:
            return np.zeros((0, 3), np.int64)
        targets = pieces(local, self.here, part.cut, tokens).reshape(-1, 2)
        sources = pieces(part.remote, chunk.there, part.cut, tokens).reshape(-1, 2)
        return merge_runs(np.concatenate((targets[:, :1], sources), axis=1))

    def verify(self, local: KvMemory, part: Part, chunk: Chunk) -> bool:
        """Whether what arrived of a chunk has the digests that the source sent."""
        assert self.here is not None
        assert chunk.digests is not None
        tokens = common_tokens(local, self.here, part.remote, chunk.there)
        if tokens[1] <= tokens[0]:
            return True
        skipped = tokens[0] // piece_tokens(local, part.cut) - chunk.there.first * (
            part.remote.block_tokens // piece_tokens(local, part.cut)
        )
        found = [digest(piece) for piece in pieces(local, self.here, part.cut, tokens)]
        return found == chunk.digests[skipped : skipped + len(found)]

    def missing(self, local: KvMemory) -> list[int]:
        """The engine's ids of the blocks that are not here whole and verified."""
        if self.here is None:
            return []
        covered = dict.fromkeys(range(self.here.first, self.here.end), 0)
        for part in self.parts:
            for chunk in part.chunks.values():
                first, end = common_tokens(local, self.here, part.remote, chunk.there)
                step = piece_tokens(local, part.cut)
                for token in range(first, end if chunk.arrived and chunk.verified else first, step):
                    covered[token // local.block_tokens] += step
        whole = local.block_tokens * len(self.parts)
        return [self.here.ids[block - self.here.first] for block, tokens in covered.items() if tokens < whole]
