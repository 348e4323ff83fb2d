"""Where a block's bytes are, in one rank's memory and in another's.

Every layer's KV is an array [block, head, token, content] with strides of its own; content is K and V of one token and
head. Two ranks may differ in strides, in tokens per block and in the heads that they have: what is read is cut into
pieces that are whole on both sides. Where nothing differs a piece is a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.errors import LayoutMismatchError
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import KvSlice

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Consecutive blocks of a prompt: the index of the first, and where each is."""

    first: int
    ids: Sequence[int]

    @property
    def end(self) -> int:
        """Index after the last."""
        return self.first + len(self.ids)


def is_dense(memory: KvMemory) -> bool:
    """Whether a block of a layer is one run of bytes."""
    return (
        memory.token_stride_bytes in (0, memory.content_bytes)
        and memory.head_stride_bytes == memory.block_tokens * memory.content_bytes
    )


def block_bytes(memory: KvMemory) -> int:
    """Bytes of one block over all layers of this rank."""
    return len(memory.layer_addresses) * memory.heads * memory.block_tokens * memory.content_bytes


def slice_between(source: KvMemory, reader: KvMemory) -> KvSlice | None:
    """How a reader must cut a source's blocks; None when whole blocks fit.

    Raises LayoutMismatchError, both values named, when no cut is whole on both sides.
    """
    if len(source.layer_addresses) != len(reader.layer_addresses) or source.content_bytes != reader.content_bytes:
        raise LayoutMismatchError(
            f"{len(source.layer_addresses)} layers of {source.content_bytes} bytes per token and head on prefill, "
            f"{len(reader.layer_addresses)} of {reader.content_bytes} on decode"
        )
    same = (source.block_tokens, source.first_head, source.heads) == (
        reader.block_tokens,
        reader.first_head,
        reader.heads,
    )
    if same and is_dense(source) and is_dense(reader):
        return None
    small, large = sorted((source.block_tokens, reader.block_tokens))
    for side in (source, reader):
        if side.token_stride_bytes != side.content_bytes and (side.token_stride_bytes or small != large):
            raise LayoutMismatchError(
                f"blocks of {source.block_tokens} tokens, {source.heads} heads on prefill, {reader.block_tokens} and "
                f"{reader.heads} on decode, can be cut only where the tokens of a head follow each other (LBHNC)"
            )
    if large % small:
        raise LayoutMismatchError(
            f"blocks of {source.block_tokens} tokens on prefill and {reader.block_tokens} on decode; one must divide "
            "the other (--block-size-tokens)"
        )
    first = max(source.first_head, reader.first_head)
    end = min(source.first_head + source.heads, reader.first_head + reader.heads)
    return KvSlice(piece_tokens=small, first_head=first, heads=max(0, end - first))


def can_cut(memory: KvMemory, cut: KvSlice) -> bool:
    """Whether this memory has such pieces; a peer may ask for anything."""
    heads = range(memory.first_head, memory.first_head + memory.heads)
    return (
        cut.piece_tokens > 0
        and memory.block_tokens % cut.piece_tokens == 0
        and (cut.piece_tokens == memory.block_tokens or memory.token_stride_bytes == memory.content_bytes)
        and cut.heads > 0
        and cut.first_head in heads
        and cut.first_head + cut.heads - 1 in heads
    )


def piece_tokens(memory: KvMemory, cut: KvSlice | None) -> int:
    """Tokens per piece."""
    return memory.block_tokens if cut is None else cut.piece_tokens


def pieces(memory: KvMemory, blocks: Blocks, cut: KvSlice | None, tokens: tuple[int, int]) -> _Ints:
    """Shape (pieces, ranges, 2): address and bytes of each range, in the order layer, head, which is the same on both
    sides.

    tokens: first and end, in whole pieces, within the blocks.
    """
    size = piece_tokens(memory, cut)
    numbers = np.arange(tokens[0] // size, tokens[1] // size, dtype=np.int64)
    per_block = memory.block_tokens // size
    starts = np.asarray(blocks.ids, np.int64)[numbers // per_block - blocks.first] * memory.block_stride_bytes
    layers = np.asarray(memory.layer_addresses, np.int64)
    if cut is None:
        heads, nbytes = np.zeros(1, np.int64), memory.heads * memory.block_tokens * memory.content_bytes
    else:
        starts = starts + numbers % per_block * size * memory.token_stride_bytes
        heads = (np.arange(cut.heads, dtype=np.int64) + cut.first_head - memory.first_head) * memory.head_stride_bytes
        nbytes = size * memory.content_bytes
    addresses = starts[:, None, None] + layers[None, :, None] + heads[None, None, :]
    addresses = addresses.reshape(len(numbers), -1)
    return np.stack((addresses, np.full_like(addresses, nbytes)), axis=2)


def common_tokens(local: KvMemory, here: Blocks, remote: KvMemory, there: Blocks) -> tuple[int, int]:
    """First and end of the tokens that both have blocks for; empty when end is not after first."""
    first = max(here.first * local.block_tokens, there.first * remote.block_tokens)
    return first, min(here.end * local.block_tokens, there.end * remote.block_tokens)
