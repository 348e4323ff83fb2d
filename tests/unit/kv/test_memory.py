"""Every head, layer and token lands in its place, however the two sides cut their memory."""

from itertools import pairwise

import numpy as np
import pytest

from twostroke.errors import LayoutMismatchError
from twostroke.kv.digest import digest
from twostroke.kv.memory import Blocks, block_bytes, common_tokens, is_dense, pieces, slice_between
from twostroke.kv.receive import Chunk, Part, Receive
from unit.kv.kv_fakes import FakeRank, cells, copy

TOKENS = 48
SHUFFLED = (7, 2, 11, 5, 0, 9, 3, 8, 1, 10, 4, 6)


def filled(**shape: int) -> tuple[FakeRank, Blocks]:
    """A source rank with a prompt of TOKENS tokens in shuffled blocks."""
    rank = FakeRank(**shape)
    blocks = Blocks(0, SHUFFLED[: TOKENS // rank.block_tokens])
    rank.write(blocks)
    return rank, blocks


@pytest.mark.parametrize("reader_tokens", [4, 8, 16])
@pytest.mark.parametrize("source_tokens", [4, 8, 16])
def test_unequal_block_sizes_are_converted(source_tokens: int, reader_tokens: int) -> None:
    """O-06."""
    source, there = filled(block_tokens=source_tokens)
    reader = FakeRank(block_tokens=reader_tokens)
    here = Blocks(0, SHUFFLED[::-1][: TOKENS // reader_tokens])
    cut = slice_between(source.memory, reader.memory)
    assert (cut is None) == (source_tokens == reader_tokens)
    receive = Receive("r", "h", 0, 1, [Part("s", source.memory, cut)], 0.0, here)
    copy(receive.plan(reader.memory, receive.parts[0], Chunk(there, verified=False)))
    assert np.array_equal(reader.of_prompt(here), cells(2, range(2), range(TOKENS)))
    untouched = [block for block in range(reader.blocks) if block not in here.ids]
    assert (reader.cells[:, untouched] == -1).all()


@pytest.mark.parametrize(
    ("source_ranks", "reader_ranks"),
    [([0, 2, 4], [0, 4]), ([0, 4], [0, 2, 4]), ([0, 1, 2, 3, 4], [0, 2, 4]), ([0, 2, 4], [0, 1, 2, 3, 4])],
    ids=["2 to 1", "1 to 2", "4 to 2", "2 to 4"],
)
@pytest.mark.parametrize("reader_tokens", [4, 8])
def test_heads_split_over_ranks_land_in_their_places(
    source_ranks: list[int], reader_ranks: list[int], reader_tokens: int
) -> None:
    """O-07: tensor parallel degrees differ, and block sizes too."""
    sources = [filled(first_head=first, heads=end - first) for first, end in pairwise(source_ranks)]
    for first, end in pairwise(reader_ranks):
        reader = FakeRank(first_head=first, heads=end - first, block_tokens=reader_tokens)
        here = Blocks(0, SHUFFLED[3:][::-1][: TOKENS // reader_tokens] if reader_tokens == 8 else SHUFFLED[::-1])
        read_heads = 0
        for source, there in sources:
            cut = slice_between(source.memory, reader.memory)
            assert cut is not None
            read_heads += cut.heads
            receive = Receive("r", "h", 0, 1, [Part("s", source.memory, cut)], 0.0, here)
            copy(receive.plan(reader.memory, receive.parts[0], Chunk(there, verified=False)))
        assert read_heads == end - first
        assert np.array_equal(reader.of_prompt(here), cells(2, range(first, end), range(TOKENS)))


@pytest.mark.parametrize(
    ("source_shape", "reader_shape"),
    [
        ({}, {}),
        ({"block_tokens": 8}, {}),
        ({}, {"block_tokens": 8}),
        ({"heads": 4}, {"first_head": 1, "heads": 2}),
        ({"heads": 4, "block_tokens": 8}, {"first_head": 2, "heads": 2}),
    ],
)
def test_both_sides_list_the_same_pieces(source_shape: dict[str, int], reader_shape: dict[str, int]) -> None:
    """O-06, O-07: digests taken on either side agree, piece by piece, and tell any two pieces apart."""
    source, there = filled(**source_shape)
    reader = FakeRank(**reader_shape)
    here = Blocks(0, SHUFFLED[::-1][: TOKENS // reader.block_tokens])
    reader.write(here)
    cut = slice_between(source.memory, reader.memory)
    found = [
        [digest(piece) for piece in pieces(rank.memory, blocks, cut, (0, TOKENS))]
        for rank, blocks in ((source, there), (reader, here))
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == len(found[0]) == TOKENS // min(source.block_tokens, reader.block_tokens)


def test_only_what_both_have_blocks_for_is_read() -> None:
    """O-05: the reader has a prefix, the source announces from the middle."""
    source, reader = FakeRank(block_tokens=8), FakeRank()
    there, here = Blocks(1, [3, 5, 7]), Blocks(3, [6, 2, 9])
    source.write(there)
    assert common_tokens(reader.memory, here, source.memory, there) == (12, 24)
    receive = Receive(
        "r", "h", 0, 1, [Part("s", source.memory, slice_between(source.memory, reader.memory))], 0.0, here
    )
    copy(receive.plan(reader.memory, receive.parts[0], Chunk(there, verified=False)))
    assert np.array_equal(reader.of_prompt(here), cells(2, range(2), range(12, 24)))
    nothing = Receive("r", "h", 0, 1, receive.parts, 0.0, Blocks(8, [6]))
    assert nothing.plan(reader.memory, receive.parts[0], Chunk(there, verified=False)).shape == (0, 3)


def test_equal_memory_is_read_in_whole_blocks() -> None:
    source, there = filled()
    reader = FakeRank()
    assert is_dense(source.memory)
    assert block_bytes(source.memory) == source.cells[:, 0].nbytes
    assert slice_between(source.memory, reader.memory) is None
    ranges = pieces(source.memory, there, None, (0, TOKENS))
    assert ranges.shape == (12, 2, 2)
    assert set(ranges[:, :, 1].flatten().tolist()) == {source.memory.head_stride_bytes * 2}


def test_padded_strides_are_cut_head_by_head() -> None:
    """O-07: a reader whose blocks have gaps between heads."""
    source, there = filled()
    wide = FakeRank(heads=4)
    memory = wide.memory
    memory.heads, memory.head_stride_bytes = 2, 2 * memory.head_stride_bytes
    cut = slice_between(source.memory, memory)
    assert cut is not None
    here = Blocks(0, SHUFFLED[::-1])
    receive = Receive("r", "h", 0, 1, [Part("s", source.memory, cut)], 0.0, here)
    copy(receive.plan(memory, receive.parts[0], Chunk(there, verified=False)))
    expected = cells(2, range(2), range(TOKENS))
    assert np.array_equal(wide.of_prompt(here)[:, ::2], expected)
    assert (wide.cells[:, :, 1::2] == -1).all()


def test_memory_that_cannot_be_cut_is_refused_with_both_values() -> None:
    """O-06, O-07: never a silent mix-up."""
    source = FakeRank().memory
    with pytest.raises(LayoutMismatchError, match="4 tokens on prefill and 6 on decode"):
        slice_between(source, FakeRank(block_tokens=6).memory)
    with pytest.raises(LayoutMismatchError, match=r"2 layers of 16 bytes .* 3 of 16"):
        slice_between(source, FakeRank(layers=3).memory)
    token_first = FakeRank(first_head=1).memory
    token_first.token_stride_bytes, token_first.head_stride_bytes = 32, 16
    with pytest.raises(LayoutMismatchError, match="LBHNC"):
        slice_between(source, token_first)


def test_blocks_whose_tokens_are_mixed_are_read_whole_or_by_heads() -> None:
    """O-06, O-07: an engine that orders the tokens of a block in its own way, as on the CPU."""
    source, reader, half, large = (
        FakeRank(heads=2),
        FakeRank(heads=2),
        FakeRank(heads=1, first_head=1),
        FakeRank(block_tokens=8),
    )
    for rank in (source, reader, half, large):
        rank.memory.token_stride_bytes = 0
    assert slice_between(source.memory, reader.memory) is None
    blocks, here = Blocks(0, [3, 5]), Blocks(0, [8, 1])
    source.write(blocks)
    cut = slice_between(source.memory, half.memory)
    assert cut is not None
    receive = Receive("r", "h", 0, 1, [Part("s", source.memory, cut)], 0.0, here)
    copy(receive.plan(half.memory, receive.parts[0], Chunk(blocks, verified=False)))
    assert np.array_equal(half.of_prompt(here), cells(2, [1], range(8)))
    with pytest.raises(LayoutMismatchError, match=r"4 tokens.* 8 and"):
        slice_between(source.memory, large.memory)


def test_ranks_without_common_heads_have_nothing_to_read() -> None:
    """O-07."""
    cut = slice_between(FakeRank(first_head=0).memory, FakeRank(first_head=2).memory)
    assert cut is not None
    assert cut.heads == 0
