"""How the reference engine chooses a token from the hash of a sequence.

The hash ranks the whole vocabulary: the token of rank r is (first + r * stride) modulo the vocabulary's size, and its
raw log probability is -(r + 1) ln 2. So probabilities are 1/2, 1/4, 1/8, ..., every logit is known in closed form, and
penalties, masks and seeds act on them as they do on a real model's. Tokens beyond the first HORIZON ranks are drawn
only if the request names them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twostroke.engine.reference_kv import mixed_int
from twostroke.engine.reference_rules import Rules
from twostroke.v1.engine_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, Finish, Logprobs

LN2 = math.log(2.0)
HORIZON = 256

Ids = NDArray[np.int64]
Floats = NDArray[np.floating[Any]]


@dataclass(frozen=True, slots=True)
class Ranking:
    """The vocabulary from likely to unlikely, for one hash."""

    first: int
    stride: int
    vocab_size: int

    @classmethod
    def of(cls, hash_: int, vocab_size: int) -> Ranking:
        stride = mixed_int(hash_ ^ 0x5DEECE66D) % vocab_size
        while math.gcd(stride, vocab_size) != 1:
            stride += 1
        return cls(hash_ % vocab_size, stride, vocab_size)

    def tokens(self, ranks: Ids) -> Ids:
        """The tokens of these ranks, 0 being the most likely."""
        return (self.first + ranks * self.stride) % self.vocab_size

    def ranks(self, tokens: Ids) -> Ids:
        """The ranks of these tokens."""
        return (tokens - self.first) * pow(self.stride, -1, self.vocab_size) % self.vocab_size


def choose(hash_: int, rules: Rules, tokens: Sequence[int], prompt_tokens: int) -> int:
    """The next token after `tokens`, whose first prompt_tokens are the prompt."""
    generated = len(tokens) - prompt_tokens
    blocked = rules.enders if generated < rules.min_tokens else frozenset[int]()
    if not rules.shaped:
        if rules.greedy:
            token = hash_ % rules.vocab_size
            if token not in blocked:
                return token
        elif not blocked:
            return _drawn(hash_, rules)
    return _chosen_from_logits(hash_, rules, blocked, tokens, prompt_tokens)


def finish_of(rules: Rules, token: int, generated: int, length: int, max_model_len_tokens: int) -> Finish | None:
    """How `token`, already counted in generated and length, ends the answer; None when it goes on."""
    if token == rules.eos:
        return Finish(reason=FINISH_REASON_STOP)
    if token in rules.stops:
        return Finish(reason=FINISH_REASON_STOP, stop_token_id=token)
    if length >= max_model_len_tokens or (rules.max_tokens is not None and generated >= rules.max_tokens):
        return Finish(reason=FINISH_REASON_LENGTH)
    return None


def logprobs(hash_: int, token: int, alternatives: int, vocab_size: int) -> Logprobs:
    """One position: the chosen token, then the most likely ones (the chosen one again, if it is among them)."""
    ranking = Ranking.of(hash_, vocab_size)
    rank = int(ranking.ranks(np.array([token], dtype=np.int64))[0])
    ranks = np.arange(alternatives, dtype=np.int64)
    return Logprobs(
        columns=alternatives + 1,
        token_ids=[token, *ranking.tokens(ranks).tolist()],
        logprobs=[-LN2 * (rank + 1), *(-LN2 * (ranks + 1)).tolist()],
        ranks=[rank + 1],
    )


def _uniform(hash_: int, seed: int) -> float:
    """A number in [0, 1) that the sequence and the seed decide."""
    return float(mixed_int(hash_ ^ mixed_int((seed ^ 0x2545F4914F6CDD1D) & ((1 << 64) - 1))) >> 11) / float(1 << 53)


def _drawn(hash_: int, rules: Rules) -> int:
    """A draw from the ranks' geometric distribution, cut off by top_k, min_p and top_p."""
    slope = -LN2 / rules.temperature
    count = min(rules.top_k or HORIZON, HORIZON, rules.vocab_size)
    if rules.min_p > 0:
        count = min(count, int(math.log(rules.min_p) / slope) + 1)
    mass = -math.expm1(count * slope)
    if rules.top_p < 1:
        count = min(count, max(1, math.ceil(math.log1p(-rules.top_p * mass) / slope)))
        mass = -math.expm1(count * slope)
    rank = min(count - 1, int(math.log1p(-_uniform(hash_, rules.seed) * mass) / slope))
    ranking = Ranking.of(hash_, rules.vocab_size)
    return (ranking.first + rank * ranking.stride) % rules.vocab_size


def _chosen_from_logits(
    hash_: int, rules: Rules, blocked: frozenset[int], tokens: Sequence[int], prompt_tokens: int
) -> int:
    ranking = Ranking.of(hash_, rules.vocab_size)
    ids = _candidates(ranking, rules, blocked, tokens, prompt_tokens)
    logits: Floats = -LN2 * (ranking.ranks(ids) + 1.0)
    if rules.bias:
        named = np.array([token for token, _ in rules.bias], dtype=np.int64)
        _add(logits, ids, named, np.array([bias for _, bias in rules.bias]))
    _penalise(logits, ids, rules, tokens, prompt_tokens)
    # Equal logits are told apart by their ids, so that the order has no say.
    order = np.lexsort((ids, -logits))
    if rules.greedy:
        return int(ids[order[0]])
    logits = logits[order] / rules.temperature
    weights = np.exp(logits - logits[0])
    kept = weights[: rules.top_k or len(weights)]
    kept = kept[kept >= rules.min_p]
    cumulative = np.cumsum(kept)
    cumulative = cumulative[: int(np.searchsorted(cumulative, rules.top_p * cumulative[-1])) + 1]
    index = int(np.searchsorted(cumulative, _uniform(hash_, rules.seed) * cumulative[-1], side="right"))
    return int(ids[order[min(index, len(cumulative) - 1)]])


def _candidates(
    ranking: Ranking, rules: Rules, blocked: frozenset[int], tokens: Sequence[int], prompt_tokens: int
) -> Ids:
    """The tokens to choose from, sorted."""
    if rules.allowed:
        ids = np.array(rules.allowed, dtype=np.int64)
    else:
        named = [*blocked, *(token for token, _ in rules.bias)]
        if rules.repetition != 1:
            named += tokens
        elif rules.frequency or rules.presence:
            named += tokens[prompt_tokens:]
        ranks = np.arange(min(rules.vocab_size, HORIZON + len(named)), dtype=np.int64)
        ids = np.unique(np.concatenate([ranking.tokens(ranks), np.array(named, dtype=np.int64)]))
    return ids[~np.isin(ids, list(blocked))]


def _penalise(logits: Floats, ids: Ids, rules: Rules, tokens: Sequence[int], prompt_tokens: int) -> None:
    if rules.repetition != 1:
        seen = np.isin(ids, np.unique(np.array(tokens, dtype=np.int64)))
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / rules.repetition, logits[seen] * rules.repetition)
    if rules.frequency or rules.presence:
        generated, counts = np.unique(np.array(tokens[prompt_tokens:], dtype=np.int64), return_counts=True)
        _add(logits, ids, generated, -(rules.frequency * counts + rules.presence))


def _add(logits: Floats, ids: Ids, tokens: Ids, amounts: Floats) -> None:
    """Adds each amount to the logit of its token, where ids, which are sorted, have it."""
    places = np.searchsorted(ids, tokens)
    places[places == len(ids)] = 0
    there = ids[places] == tokens
    logits[places[there]] += amounts[there]
