"""Ranks without a transport: memory whose cells say what they are, and a wire that does what the test says."""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from twostroke.kv.holds import WORD_BYTES
from twostroke.kv.memory import Blocks
from twostroke.kv.reader import SCRATCH_WORDS, Reader
from twostroke.kv.receive import Outcome
from twostroke.kv.transport import Quarantine, Rows
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import TransferSignal

Cells = npt.NDArray[np.int64]
CONTENT_WORDS = 2
SLOTS = 8


@dataclass
class FakeRank:
    """KV as an array of words (layer, block, head, token, content), and a small hold table."""

    layers: int = 2
    blocks: int = 12
    heads: int = 2
    first_head: int = 0
    block_tokens: int = 4
    cells: Cells = field(init=False)
    table: npt.NDArray[np.uint64] = field(init=False)
    memory: KvMemory = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.layers, self.blocks, self.heads, self.block_tokens, CONTENT_WORDS)
        self.cells = np.full(shape, -1, np.int64)
        self.table = np.zeros(SLOTS, np.uint64)
        self.memory = KvMemory(
            hold_table_address=self.table.ctypes.data,
            layer_addresses=[layer.ctypes.data for layer in self.cells],
            block_stride_bytes=self.cells.strides[1],
            head_stride_bytes=self.cells.strides[2],
            token_stride_bytes=self.cells.strides[3],
            content_bytes=8 * CONTENT_WORDS,
            block_tokens=self.block_tokens,
            first_head=self.first_head,
            heads=self.heads,
        )

    def of_prompt(self, blocks: Blocks) -> Cells:
        """Shape (layers, heads, tokens, content): a copy of the blocks, in the order of the prompt."""
        chosen = self.cells[:, list(blocks.ids)].transpose(0, 2, 1, 3, 4)
        return chosen.reshape(self.layers, self.heads, -1, CONTENT_WORDS)

    def write(self, blocks: Blocks) -> None:
        """Writes into each cell of the prompt's blocks what it is."""
        for index, block in enumerate(blocks.ids, blocks.first):
            tokens = range(index * self.block_tokens, (index + 1) * self.block_tokens)
            heads = range(self.first_head, self.first_head + self.heads)
            self.cells[:, block] = cells(self.layers, heads, tokens).reshape(self.cells[:, block].shape)


def cells(layers: int, heads: Sequence[int], tokens: Sequence[int]) -> Cells:
    """What the cells of these layers, heads and tokens hold; shape (layers, heads, tokens, content)."""
    layer, head, token, word = np.ix_(range(layers), heads, tokens, range(CONTENT_WORDS))
    return np.asarray(((layer * 100 + head) * 10000 + token) * 10 + word, np.int64)


def copy(rows: Rows) -> None:
    """What a transport does."""
    for local, remote, nbytes in rows.tolist():
        ctypes.memmove(local, remote, nbytes)


@dataclass
class Read:
    """A read that was posted."""

    source: str
    rows: Rows
    deadline_s: float
    over: Callable[[str | None], None]

    @property
    def is_word(self) -> bool:
        """Whether it looks at a hold."""
        return self.rows[:, 2].tolist() == [WORD_BYTES]

    def complete(self) -> None:
        """It arrives."""
        copy(self.rows)
        self.over(None)


class Wire:
    """Everything that a Reader does to the outside, and a clock that the test moves."""

    def __init__(self, rank: FakeRank, timeout_s: float = 10.0, *, verify: bool = True, readers: int = 1) -> None:
        self.now_s = 1000.0
        self.connected: list[str] = []
        self.sent: list[tuple[str, TransferSignal]] = []
        self.reads: list[Read] = []
        self.outcomes: list[Outcome] = []
        self.down: set[str] = set()
        self.scratch = np.zeros(SCRATCH_WORDS, np.uint64)
        self.reader = Reader(
            rank.memory,
            self.scratch,
            self.connected.append,
            lambda name, signal: self.sent.append((name, signal)),
            self._fetch,
            self.outcomes.append,
            lambda: self.now_s,
            timeout_s=timeout_s,
            readers=readers,
            verify=verify,
        )

    def _fetch(self, source: str, rows: Rows, deadline_s: float, over: Callable[[str | None], None]) -> bool:
        if source in self.down:
            return False
        self.reads.append(Read(source, rows, deadline_s, over))
        return True

    def asked(self) -> list[str]:
        """Which sources were sent tickets, since the last look."""
        names = [name for name, signal in self.sent if signal.HasField("ticket")]
        self.sent.clear()
        return names

    def take(self) -> list[Read]:
        """The reads posted since the last look."""
        reads, self.reads = self.reads, []
        return reads

    def complete(self) -> None:
        """All reads arrive, and those that they lead to."""
        while self.reads:
            for read in self.take():
                read.complete()

    def lose(self, source: str, *, again: bool, quarantine: Quarantine | None = None) -> None:
        """The connection is gone, with all its reads."""
        self.reads = [read for read in self.reads if read.source != source]
        self.reader.lost(source, f"{source}: connection reset", quarantine, again=again)
