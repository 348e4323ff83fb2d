"""A digest of memory at memory speed: did what arrived leave the other side just so?

A range is cut into stripes of 8 KiB, the last one filled up with zeros. Of each stripe two 64-bit values are taken: NH,
the sum over its words of (low half + key) * (high half + key'), and the plain sum of its words. Each is mixed with the
stripe's number and added up, apart from the other; ranges are combined in the same way. The result, 128 bits:

  - any change within one aligned word, so any flipped byte: always seen, by the plain sum and a bijective mix
  - any other difference (blocks swapped, zeroed, shifted, stale): missed with probability about 2**-32, by NH's bound;
    no guard against someone who builds collisions on purpose

The digest depends on how memory is cut into ranges: both ends list the same ranges in the same order, and merge them
for the transfer only.
"""

from __future__ import annotations

import ctypes
import importlib
from types import ModuleType

import numpy as np
import numpy.typing as npt

Ranges = npt.NDArray[np.int64]
"""Shape (N, 2): address, bytes."""

DIGEST_BYTES = 16
STRIPE_WORDS = 1024
_STRIPE_BYTES = 8 * STRIPE_WORDS
_WEIGHTS = (np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03))

Words = npt.NDArray[np.uint64]


def _mix(x: Words) -> Words:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


_KEY = _mix(np.arange(1, STRIPE_WORDS + 1, dtype=np.uint64) * np.uint64(0xA0761D6478BD642F))


def native_module() -> ModuleType | None:
    """The extension, or None where it is not built."""
    try:
        return importlib.import_module("twostroke.kv._ucx")
    except ImportError:
        return None


def digest(ranges: Ranges) -> bytes:
    """16 bytes for the content of the ranges, in order. Reads this process's memory at the given addresses, so they
    must be mapped; not for device memory. Releases the GIL when the extension is built, else takes about ten times as
    long. Raises ValueError when ranges is not int64 of shape (N, 2).
    """
    if ranges.ndim != 2 or ranges.shape[1] != 2 or ranges.dtype != np.int64:
        raise ValueError(f"ranges are int64 of shape (N, 2), not {ranges.dtype} of {ranges.shape}")
    module = native_module()
    if module is None:
        return digest_numpy(ranges)
    result: bytes = module.digest(np.ascontiguousarray(ranges), _KEY)
    return result


def digest_numpy(ranges: Ranges) -> bytes:
    """The same without the extension."""
    total = np.zeros(2, dtype=np.uint64)
    for index, (address, nbytes) in enumerate(ranges.tolist(), start=1):
        for half, value in enumerate(_range_numpy(address, nbytes)):
            total[half : half + 1] += _mix(value + np.array([index], np.uint64) * _WEIGHTS[half])
    return total.astype("<u8").tobytes()


def _range_numpy(address: int, nbytes: int) -> tuple[Words, Words]:
    data = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)) if nbytes else np.zeros(0, np.uint8)
    stripes = -(-nbytes // _STRIPE_BYTES)
    padded = np.zeros(stripes * _STRIPE_BYTES, dtype=np.uint8)
    padded[:nbytes] = data
    words = padded.view("<u8").reshape(stripes, STRIPE_WORDS)
    halves = words.view("<u4").reshape(stripes, STRIPE_WORDS, 2) + _KEY.view("<u4").reshape(STRIPE_WORDS, 2)
    nh = (halves[:, :, 0].astype(np.uint64) * halves[:, :, 1]).sum(axis=1, dtype=np.uint64)
    plain = words.sum(axis=1, dtype=np.uint64)
    number = np.arange(1, stripes + 1, dtype=np.uint64)
    return _fold(nh, number, nbytes, _WEIGHTS[0]), _fold(plain, number, nbytes, _WEIGHTS[1])


def _fold(values: Words, number: Words, nbytes: int, weight: np.uint64) -> Words:
    size = _mix(np.array([nbytes], np.uint64) + weight)
    total: Words = np.concatenate((size, _mix(values + number * weight))).sum(dtype=np.uint64, keepdims=True)
    return total
