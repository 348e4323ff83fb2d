"""The reference model: its size, its KV layout, and its answers without any engine."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from twostroke.engine.reference_kv import (
    LAYERS,
    WORDS_PER_TOKEN,
    choice_hashes,
    digests,
    kv_words,
    token_terms,
    weighted,
)
from twostroke.engine.reference_rules import rules_of
from twostroke.engine.reference_sampling import choose, finish_of
from twostroke.kv.shm import Words
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.kv_pb2 import KvLayout

MODEL_NAME = "reference"
MODEL_VERSION = "1"
"""Changes whenever the same prompt would get other KV or another answer."""
VOCAB_SIZE = 49152
MAX_MODEL_LEN_TOKENS = 32768
BLOCK_SIZE_TOKENS = 16


def layout(block_size_tokens: int, vocab_size: int) -> KvLayout:
    """What the KV looks like. The model's name is not part of it: all reference models compute the same KV."""
    identity = f"{MODEL_NAME} {MODEL_VERSION} {vocab_size}"
    return KvLayout(
        model_digest=hashlib.sha256(identity.encode()).hexdigest()[:16],
        dtype="uint64",
        block_size_tokens=block_size_tokens,
        layers=LAYERS,
        kv_heads=1,
        head_size=1,
        tensor_parallel=1,
        order="BLTNHC",
        connector="shm",
        connector_version="2",
    )


def block_words(block_size_tokens: int) -> int:
    """64-bit words per block."""
    return block_size_tokens * WORDS_PER_TOKEN


def expected_tokens(
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    count: int = 16,
    *,
    vocab_size: int = VOCAB_SIZE,
    max_model_len_tokens: int = MAX_MODEL_LEN_TOKENS,
) -> list[int]:
    """The first `count` tokens of the answer to prompt, fewer when the answer ends earlier.

    Raises what the engine raises for sampling parameters that it refuses.
    """
    rules = rules_of(sampling or SamplingParams(), vocab_size)
    tokens = list(prompt)
    prompt_digests = digests(tokens)
    digest = prompt_digests[-1:]
    positions = np.arange(len(tokens), dtype=np.uint64)
    mixture = weighted(kv_words(prompt_digests), positions).sum(keepdims=True, dtype=np.uint64)
    while len(tokens) - len(prompt) < count:
        length = _one(len(tokens))
        token = choose(int(choice_hashes(mixture, length)[0]), rules, tokens, len(prompt))
        tokens.append(token)
        if finish_of(rules, token, len(tokens) - len(prompt), len(tokens), max_model_len_tokens) is not None:
            break
        digest = digest + token_terms(_one(token), length)
        mixture = mixture + weighted(kv_words(digest), length)
    return tokens[len(prompt) :]


def _one(value: int) -> Words:
    return np.array([value], dtype=np.uint64)
