"""The reference engine's KV: what the bytes of a position are, and how they become the next token.

The digest of position p covers the tokens 0..p and their places: digest[p] = sum over i <= p of mixed(token[i], i).
From it come two words per layer, K and V, which stand for the position in the pool. To choose a token, the words of
every position are read back and added up under weights that depend on position, layer and kind. So any wrong word, any
word in a wrong place and any missing word changes the sum, and with it the token. Everything is modulo 2**64; arrays
have dtype uint64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twostroke.kv.shm import Words

LAYERS = 2
KINDS = 2
"""K, then V."""
WORDS_PER_TOKEN = LAYERS * KINDS

_MASK = (1 << 64) - 1
_TOKEN = np.uint64(0xD1342543DE82EF95)
_PLACE = np.uint64(0x9E3779B97F4A7C15)
_START = np.uint64(0x7FB5D329728EA185)
_KIND_SALTS: Words = np.array(
    [[0x81DADEF4BC2DD44D, 0x99BCF6822B23CA35], [0x14020A57ACCED8B7, 0x5851F42D4C957F2D]], dtype=np.uint64
)
_KIND_WEIGHTS: Words = np.array(
    [[0xBF58476D1CE4E5B8, 0x94D049BB133111EA], [0xFF51AFD7ED558CCC, 0xC4CEB9FE1A85EC52]], dtype=np.uint64
)
_KIND_SALTS.setflags(write=False)
_KIND_WEIGHTS.setflags(write=False)


def mixed(values: Words) -> Words:
    """Spreads every bit of each value over all bits of its result (splitmix64's finaliser)."""
    z = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def mixed_int(value: int) -> int:
    """`mixed` for one Python integer."""
    z = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def token_terms(tokens: Words, positions: Words) -> Words:
    """What each token adds to the digests from its position on; shape as the arguments'."""
    return mixed(tokens * _TOKEN + positions * _PLACE + _START)


def digests(tokens: Sequence[int]) -> Words:
    """The digest of every position, shape (tokens,)."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    return np.cumsum(token_terms(np.array(tokens, dtype=np.uint64), positions), dtype=np.uint64)


def kv_words(digests_: Words) -> Words:
    """The KV of positions with these digests, shape (positions, LAYERS, KINDS)."""
    return mixed(digests_[:, None, None] + _KIND_SALTS)


def weighted(words: Words, positions: Words) -> Words:
    """What each position adds to the mixture, shape (positions,); words has shape (positions, LAYERS, KINDS)."""
    # Odd weights: no single changed word can vanish from the sum.
    weights = (positions[:, None, None] * _PLACE + _KIND_WEIGHTS) * np.uint64(2) + np.uint64(1)
    total: Words = (words * weights).sum(axis=(1, 2), dtype=np.uint64)
    return total


def mixture(words: Words) -> int:
    """The sum from which the token after `words` follows; words covers the positions from 0 on."""
    return int(weighted(words, np.arange(len(words), dtype=np.uint64)).sum(dtype=np.uint64))


def choice_hashes(mixtures: Words, lengths: Words) -> Words:
    """The hash that decides the next token, from the mixture and the number of tokens it covers."""
    return mixed(mixtures + lengths * _TOKEN)
