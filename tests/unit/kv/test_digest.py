"""A digest sees what a transfer can do wrong, and is the same with and without the extension."""

import numpy as np
import pytest

from twostroke.kv.digest import DIGEST_BYTES, Ranges, digest, digest_numpy, native_module

RANDOM = np.random.default_rng(7)
BLOCK = 24 << 10


def ranges_of(memory: np.ndarray, nbytes: int = BLOCK) -> Ranges:
    starts = np.arange(0, memory.nbytes, nbytes)
    sizes = np.minimum(nbytes, memory.nbytes - starts)
    return np.stack([memory.ctypes.data + starts, sizes], axis=1).astype(np.int64)


def memory(nbytes: int) -> np.ndarray:
    return RANDOM.integers(0, 256, nbytes, dtype=np.uint8)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 8191, 8192, 8193, 65536, 100_001])
def test_native_and_numpy_agree(nbytes: int) -> None:
    assert native_module() is not None, "the extension is not built"
    content = memory(nbytes)
    for cut in (nbytes, max(1, nbytes // 3)):
        ranges = ranges_of(content, cut)
        assert digest(ranges) == digest_numpy(ranges)
        assert len(digest(ranges)) == DIGEST_BYTES


def test_equal_bytes_elsewhere_have_the_same_digest() -> None:
    content = memory(5 * BLOCK)
    copy = content.copy()
    assert digest(ranges_of(content)) == digest(ranges_of(copy))


def test_every_flipped_byte_is_seen() -> None:
    content = memory(3 * BLOCK + 5)
    ranges = ranges_of(content)
    right = digest(ranges)
    for _ in range(2000):
        at, flip = RANDOM.integers(content.nbytes), RANDOM.integers(1, 256, dtype=np.uint8)
        content[at] ^= flip
        assert digest(ranges) != right, (at, flip)
        content[at] ^= flip
    assert digest(ranges) == right


def test_two_top_bits_do_not_cancel() -> None:
    content = memory(2 * BLOCK)
    ranges = ranges_of(content)
    right = digest(ranges)
    for _ in range(500):
        one, two = RANDOM.choice(content.nbytes // 8, 2, replace=False)
        content[[8 * one + 7, 8 * two + 7]] ^= 0x80
        assert digest(ranges) != right
        content[[8 * one + 7, 8 * two + 7]] ^= 0x80


@pytest.mark.parametrize("unit", [8, 64, 4096, 8192, BLOCK])
def test_swapped_pieces_are_seen(unit: int) -> None:
    content = memory(8 * BLOCK)
    ranges = ranges_of(content)
    right = digest(ranges)
    pieces = content.reshape(-1, unit)
    for _ in range(50):
        one, two = RANDOM.choice(len(pieces), 2, replace=False)
        pieces[[one, two]] = pieces[[two, one]]
        assert digest(ranges) != right
        pieces[[one, two]] = pieces[[two, one]]


def test_zeroed_and_missing_blocks_are_seen() -> None:
    content = memory(6 * BLOCK)
    ranges = ranges_of(content)
    right = digest(ranges)
    assert digest(ranges[:-1]) != right
    assert digest(ranges[::-1]) != right
    content[2 * BLOCK : 3 * BLOCK] = 0
    assert digest(ranges) != right


def test_zeros_of_other_length_differ() -> None:
    zeros = np.zeros(4 * BLOCK, dtype=np.uint8)
    digests = {digest(ranges_of(zeros[:size], size)) for size in (1, 8, 4096, 8192, 8200, BLOCK, 4 * BLOCK)}
    assert len(digests) == 7


def test_no_ranges_and_empty_ranges_have_digests_too() -> None:
    empty = np.zeros((0, 2), dtype=np.int64)
    hollow = np.array([[memory(8).ctypes.data, 0]], dtype=np.int64)
    assert digest(empty) == digest_numpy(empty) == bytes(DIGEST_BYTES)
    assert digest(hollow) == digest_numpy(hollow) != digest(empty)


def test_wrong_shape_is_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        digest(np.zeros((2, 3), dtype=np.int64))
