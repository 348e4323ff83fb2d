"""What a step of the reference engine computes: KV into the pool, and out of it the hashes that decide tokens."""

from __future__ import annotations

from collections.abc import Sequence as Rows

import numpy as np

from twostroke.engine.reference_kv import (
    KINDS,
    LAYERS,
    choice_hashes,
    kv_words,
    mixture,
    token_terms,
    weighted,
)
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_sequence import Sequence
from twostroke.kv.shm import Words


def compute_chunk(sequence: Sequence, tokens: int, pool: BlockPool) -> int | None:
    """Writes the KV of so many more tokens. Returns the hash that decides the next token once none is missing."""
    start, stop = sequence.computed, sequence.computed + tokens
    positions = np.arange(start, stop)
    blocks = np.array(sequence.blocks, dtype=np.int64)[positions // pool.block_size_tokens]
    pool.kv[blocks, :, :, positions % pool.block_size_tokens] = kv_words(sequence.digests[start:stop])
    sequence.computed_tokens += max(0, min(stop, sequence.prompt_tokens) - start)
    sequence.computed = stop
    publish_full_blocks(sequence, start // pool.block_size_tokens, stop // pool.block_size_tokens, pool)
    if sequence.missing:
        return None
    sequence.digest = int(sequence.digests[stop - 1])
    sequence.mixture = mixture(read_kv(sequence.blocks, stop, pool))
    return int(choice_hashes(_words([sequence.mixture]), _words([stop]))[0])


def compute_decodes(sequences: Rows[Sequence], pool: BlockPool) -> list[int]:
    """Writes and reads back the KV of one token of each sequence. Returns the hashes that decide the next tokens."""
    size = pool.block_size_tokens
    positions = _words([sequence.computed for sequence in sequences])
    latest = _words([sequence.tokens[-1] for sequence in sequences])
    digests = _words([sequence.digest for sequence in sequences]) + token_terms(latest, positions)
    blocks = np.array([sequence.blocks[sequence.computed // size] for sequence in sequences], dtype=np.int64)
    places = (positions % np.uint64(size)).astype(np.int64)
    pool.kv[blocks, :, :, places] = kv_words(digests)
    mixtures = _words([sequence.mixture or 0 for sequence in sequences])
    mixtures = mixtures + weighted(pool.kv[blocks, :, :, places], positions)
    hashes = choice_hashes(mixtures, positions + np.uint64(1))
    for sequence, digest, mixed in zip(sequences, digests.tolist(), mixtures.tolist(), strict=True):
        sequence.computed += 1
        sequence.digest = digest
        sequence.mixture = mixed
        if sequence.computed % size == 0:
            publish_full_blocks(sequence, sequence.computed // size - 1, sequence.computed // size, pool)
    chosen: list[int] = hashes.tolist()
    return chosen


def read_kv(blocks: Rows[int], tokens: int, pool: BlockPool) -> Words:
    """The KV of a sequence's first tokens as it lies in its blocks, shape (tokens, LAYERS, KINDS)."""
    used = list(blocks[: pool.blocks_for(tokens)])
    return pool.kv[used].transpose(0, 3, 1, 2).reshape(-1, LAYERS, KINDS)[:tokens]


def publish_full_blocks(sequence: Sequence, start: int, stop: int, pool: BlockPool) -> None:
    """Offers the full blocks start to stop to other requests."""
    keys = sequence.prefix_keys(pool.block_size_tokens, 0, stop)
    for index in range(start, stop):
        pool.publish(keys[index], sequence.blocks[index], keys[index - 1] if index else None)


def _words(values: list[int]) -> Words:
    return np.array(values, dtype=np.uint64)
