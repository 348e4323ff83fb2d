"""What a reader knows of a hand-off that it fetches, part by part; a part is what comes from one rank of the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from twostroke.kv.digest import Ranges
from twostroke.kv.memory import Blocks, common_tokens, piece_tokens, pieces
from twostroke.kv.transport import Rows, merge_runs
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import KvSlice, TransferFinal


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
    """Blocks that are not here whole and known to be right; none where all went well."""
    quarantine: tuple[tuple[int, int], ...] = ()
    """Memory that must never be used again."""
    chunks: int = 0
    """In how many it came."""


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
    sources: int = 1
    """Ranks of the source."""
    chunks: dict[int, Chunk] = field(default_factory=dict)
    final: TransferFinal | None = None
    in_flight: int = 0
    """Reads that may still write."""
    word: int | None = None
    """Where the hold is being looked at for the last time."""
    complete: bool = False

    def restart(self) -> None:
        """Forgets what was under way on a connection that is gone; what arrived and was verified is fetched no more."""
        self.chunks = {number: chunk for number, chunk in self.chunks.items() if chunk.arrived and chunk.verified}
        self.word = None
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
    losses: list[str] = field(default_factory=list)
    """How connections were lost, one for each that was tried."""
    nbytes: int = 0
    failure: str | None = None
    corrupt: bool = False
    reused: bool = False
    """The source gave the blocks away: nothing that came from there is trusted."""
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

    def verify(self, local: KvMemory, part: Part, chunk: Chunk, digest_of: Callable[[Ranges], bytes]) -> bool:
        """Whether what arrived of a chunk has the digests that the source sent; it need not send one of every piece."""
        assert self.here is not None
        assert chunk.digests is not None
        tokens = common_tokens(local, self.here, part.remote, chunk.there)
        if tokens[1] <= tokens[0]:
            return True
        skipped = tokens[0] // piece_tokens(local, part.cut) - chunk.there.first * (
            part.remote.block_tokens // piece_tokens(local, part.cut)
        )
        arrived = pieces(local, self.here, part.cut, tokens)
        expected = chunk.digests[skipped : skipped + len(arrived)]
        return len(expected) == len(arrived) and all(
            not each or digest_of(piece) == each for piece, each in zip(arrived, expected, strict=True)
        )

    def outcome(self, local: KvMemory, now_s: float) -> Outcome:
        """How it ended."""
        finals = [part.final for part in self.parts if part.final is not None]
        return Outcome(
            self.request_id,
            self.handoff_id,
            finals[0].first_token_id if finals else None,
            self.nbytes,
            now_s - self.begun_s,
            self.failure,
            self.corrupt,
            self.missing(local) if self.failure else (),
            self.quarantine,
            sum(chunk.arrived for part in self.parts for chunk in part.chunks.values()),
        )

    def missing(self, local: KvMemory) -> list[int]:
        """The engine's ids of the blocks that are not here whole and known to be right: by their digests, or because
        all of their part was held to the end."""
        if self.here is None:
            return []
        tokens = self._covered(local, trusted=True)
        whole = local.block_tokens * len(self.parts)
        return [block for block, count in zip(self.here.ids, tokens, strict=True) if self.reused or count < whole]

    def is_short(self, local: KvMemory) -> bool:
        """Whether the sources left blocks out; the last one may be filled in part, by smaller blocks."""
        tokens = self._covered(local, trusted=False)
        whole = local.block_tokens * len(self.parts)
        return any(count < whole for count in tokens[:-1]) or not all(tokens[-1:])

    def _covered(self, local: KvMemory, *, trusted: bool) -> list[int]:
        """Tokens that arrived per block, counted once for each part."""
        assert self.here is not None
        covered = [0] * len(self.here.ids)
        for part in self.parts:
            step = piece_tokens(local, part.cut)
            for chunk in part.chunks.values():
                # Digests of a sample show that most is right, not all.
                known = part.complete or (chunk.verified and bool(chunk.digests) and all(chunk.digests or ()))
                if not chunk.arrived or (trusted and not known):
                    continue
                for token in range(*common_tokens(local, self.here, part.remote, chunk.there), step):
                    covered[token // local.block_tokens - self.here.first] += step
        return covered
