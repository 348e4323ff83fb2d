"""Which sampling parameters the reference engine understands, checked once per request."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.errors import InvalidRequestError, UnsupportedFieldError
from twostroke.v1.engine_pb2 import SamplingParams

SUPPORTED_FIELDS = frozenset(
    {
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "max_tokens",
        "min_tokens",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "stop_token_ids",
        "eos_token_id",
        "all_stop_token_ids",
        "ignore_eos",
        "logprobs",
        "logit_bias",
        "allowed_token_ids",
        "skip_reading_prefix_cache",
    }
)


@dataclass(frozen=True, slots=True)
class Rules:
    """The sampling parameters of one request."""

    vocab_size: int
    temperature: float = 0.0
    """0 is greedy, and the default."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is all."""
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    """None is as many as the model has room for."""
    min_tokens: int = 0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    eos: int | None = None
    """None when end of text does not end the answer."""
    stops: frozenset[int] = frozenset()
    enders: frozenset[int] = frozenset()
    """What may not be chosen before min_tokens."""
    logprobs: int | None = None
    """Alternatives per token; None is no log probabilities."""
    bias: tuple[tuple[int, float], ...] = ()
    allowed: tuple[int, ...] = ()
    """Empty is all."""
    read_prefix_cache: bool = True

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def shaped(self) -> bool:
        """Whether something other than min_tokens changes the logits."""
        return bool(self.bias or self.allowed or self.presence or self.frequency or self.repetition != 1)


def rules_of(params: SamplingParams, vocab_size: int) -> Rules:
    """Raises UnsupportedFieldError naming the field, InvalidRequestError for a value outside its range."""
    for field, _ in params.ListFields():
        if field.name not in SUPPORTED_FIELDS:
            raise UnsupportedFieldError(f"the reference engine does not do {field.name}; leave it out")
    ignore_eos = params.ignore_eos
    eos = params.eos_token_id if params.HasField("eos_token_id") else None
    stops = frozenset(params.stop_token_ids)
    top_k = max(params.top_k, 0)
    rules = Rules(
        vocab_size=vocab_size,
        temperature=params.temperature,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        top_k=min(top_k, vocab_size),
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=params.repetition_penalty if params.HasField("repetition_penalty") else 1.0,
        eos=None if ignore_eos else eos,
        stops=stops,
        enders=stops | frozenset(params.all_stop_token_ids) | (frozenset() if eos is None else {eos}),
        logprobs=_logprobs(params, vocab_size),
        bias=tuple(sorted(params.logit_bias.items())),
        allowed=tuple(sorted(set(params.allowed_token_ids))),
        read_prefix_cache=not params.skip_reading_prefix_cache,
    )
    _check(rules, params.top_k)
    return rules


def _logprobs(params: SamplingParams, vocab_size: int) -> int | None:
    if not params.HasField("logprobs"):
        return None
    if not -1 <= params.logprobs <= vocab_size:
        raise InvalidRequestError(f"logprobs is {params.logprobs}; the vocabulary has {vocab_size} tokens")
    return vocab_size if params.logprobs == -1 else params.logprobs


def _check(rules: Rules, top_k: int) -> None:
    ranges = (
        ("temperature", rules.temperature, 0 <= rules.temperature < math.inf, "at least 0"),
        ("top_p", rules.top_p, 0 < rules.top_p <= 1, "above 0 and at most 1"),
        ("top_k", top_k, top_k >= -1, "-1, 0 or the number of candidates"),
        ("min_p", rules.min_p, 0 <= rules.min_p <= 1, "between 0 and 1"),
        ("max_tokens", rules.max_tokens, rules.max_tokens != 0, "at least 1"),
        ("presence_penalty", rules.presence, math.isfinite(rules.presence), "a number"),
        ("frequency_penalty", rules.frequency, math.isfinite(rules.frequency), "a number"),
        ("repetition_penalty", rules.repetition, 0 < rules.repetition < math.inf, "above 0"),
    )
    for name, value, fits, wanted in ranges:
        if not fits:
            raise InvalidRequestError(f"{name} is {value}; it must be {wanted}")
    if rules.max_tokens is not None and rules.min_tokens > rules.max_tokens:
        raise InvalidRequestError(f"min_tokens is {rules.min_tokens}, above max_tokens, {rules.max_tokens}")
    for name, ids in (("logit_bias", [token for token, _ in rules.bias]), ("allowed_token_ids", rules.allowed)):
        if ids and max(ids) >= rules.vocab_size:
            raise InvalidRequestError(f"{name} has token {max(ids)}; the vocabulary ends at {rules.vocab_size - 1}")
    if not all(math.isfinite(bias) for _, bias in rules.bias):
        raise InvalidRequestError("logit_bias has a value that is not a finite number")
    if rules.min_tokens and rules.enders.issuperset(rules.allowed or range(rules.vocab_size)):
        raise InvalidRequestError("min_tokens leaves nothing to choose: every token that may be chosen ends the answer")
