"""Turns requests into sequences of the reference engine, or refuses them."""

from __future__ import annotations

from twostroke.engine.base import Stroke
from twostroke.engine.reference_core import Limits
from twostroke.engine.reference_handoff import check_handoff
from twostroke.engine.reference_rules import Rules, rules_of
from twostroke.engine.reference_sequence import Sequence
from twostroke.errors import InvalidRequestError, PromptTooLongError, UnsupportedFieldError
from twostroke.policy.block_hash import KvIdentity
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.kv_pb2 import Handoff


def sequence_of(
    request: EngineRequest,
    stroke: Stroke,
    handoff: Handoff | None,
    limits: Limits,
    *,
    ordinal: int,
    now_s: float,
    early: bool,
    chunk_tokens: int,
) -> Sequence:
    """A sequence that has not run. early: offer a prompt that is read for another worker from its first step on.
    chunk_tokens: see Engine.admit.

    Raises UnsupportedFieldError, PromptTooLongError, InvalidRequestError.
    """
    prompt, answer = list(request.prompt_token_ids), list(request.output_token_ids)
    tokens = prompt + answer
    _check_tokens(prompt, tokens, limits)
    if request.HasField("adapter"):
        raise UnsupportedFieldError(f"adapter {request.adapter.name!r}: the reference engine has no adapters")
    rules = rules_of(request.sampling, limits.vocab_size)
    if rules.max_tokens is not None and len(answer) >= rules.max_tokens:
        raise InvalidRequestError(f"max_tokens is {rules.max_tokens}, and {len(answer)} tokens are there already")
    if handoff is not None:
        if stroke is not Stroke.DECODE:
            raise InvalidRequestError(f"the {stroke.value} stroke takes no hand-off")
        check_handoff(handoff, len(prompt), limits.block_size_tokens)
    return Sequence(
        request_id=request.request_id,
        ordinal=ordinal,
        stroke=stroke,
        rules=rules,
        identity=KvIdentity(salt=request.cache_salt if request.HasField("cache_salt") else None),
        chunk_tokens=chunk_tokens,
        order=(request.priority, ordinal),
        prompt_tokens=len(prompt),
        tokens=tokens,
        admitted_s=now_s,
        handoff=handoff,
        early=early and stroke is Stroke.PREFILL and not _ends_at_once(rules, len(prompt), limits),
    )


def _ends_at_once(rules: Rules, prompt_tokens: int, limits: Limits) -> bool:
    return rules.max_tokens == 1 or prompt_tokens + 1 >= limits.max_model_len_tokens


def _check_tokens(prompt: list[int], tokens: list[int], limits: Limits) -> None:
    if not prompt:
        raise InvalidRequestError("the prompt is empty")
    if len(tokens) >= limits.max_model_len_tokens:
        raise PromptTooLongError(
            f"the prompt and the answer so far have {len(tokens)} tokens; the model takes "
            f"{limits.max_model_len_tokens}, of which at least one is for the answer"
        )
    if max(tokens) >= limits.vocab_size:
        raise InvalidRequestError(f"token {max(tokens)} is not below the vocabulary's size, {limits.vocab_size}")
