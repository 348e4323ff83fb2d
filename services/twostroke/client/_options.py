"""The options of a request, and the message they become. No I/O."""

from __future__ import annotations

import difflib
import json
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypedDict, get_type_hints

from twostroke.client import _check as check
from twostroke.client._types import ChatMessage
from twostroke.errors import InvalidRequestError
from twostroke.v1.engine_pb2 import Choice, SamplingParams, StructuredOutputs
from twostroke.v1.inference_pb2 import ChatMessage as WireMessage
from twostroke.v1.inference_pb2 import ChatMessages, GenerateRequest

Prompt: TypeAlias = str | Sequence[int] | Sequence[ChatMessage | Mapping[str, str]]
"""Text, token ids, or a conversation with its oldest message first."""


class GenerateOptions(TypedDict, total=False):
    """The keyword arguments of `generate` and `complete`. None is the same as leaving one out: the router, or else the
    model's generation settings, decides. Values are checked here for their types, and by the router for the rest.
    """

    model: str | None
    """A name of `list_models`; not needed where only one is served."""
    max_tokens: int | None
    """Most tokens to generate; the room left in the model's length when not given."""
    min_tokens: int | None
    """Tokens before which neither end of text nor a stop token may be chosen."""
    temperature: float | None
    """0 is greedy."""
    top_p: float | None
    """Nucleus mass in (0, 1]."""
    top_k: int | None
    """Number of candidates; 0 is all."""
    min_p: float | None
    """Least probability relative to the most likely token."""
    seed: int | None
    """Seed of this request's own random numbers."""
    stop: str | Sequence[str] | None
    """Text that ends the answer."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end the answer."""
    include_stop_str_in_output: bool | None
    """Keeps the stop string in the text."""
    ignore_eos: bool | None
    """Goes on after end of text."""
    presence_penalty: float | None
    """Added once for every token already in the answer."""
    frequency_penalty: float | None
    """Added per occurrence in the answer."""
    repetition_penalty: float | None
    """Divides or multiplies the logits of tokens in prompt and answer."""
    logit_bias: Mapping[int, float] | None
    """Added to the logits of single tokens."""
    allowed_token_ids: Sequence[int] | None
    """The only tokens that may be chosen."""
    logprobs: int | None
    """Number of alternatives to report per token; -1 is the whole vocabulary."""
    json_schema: str | Mapping[str, Any] | None
    """A JSON schema the answer must follow."""
    json_object: bool | None
    """The answer must be a JSON object."""
    regex: str | None
    """A regular expression the answer must match."""
    choice: Sequence[str] | None
    """Texts of which the answer must be one."""
    grammar: str | None
    """A context free grammar the answer must follow."""
    keep_special_tokens: bool | None
    """Shows special tokens in the text."""
    template_kwargs: Mapping[str, Any] | None
    """Arguments for the chat template; with a conversation only."""
    cache_salt: str | None
    """Separates prefix caches of tenants."""
    skip_reading_prefix_cache: bool | None
    """Computes every prompt token."""
    priority: int | None
    """Lower runs earlier; 0 when not given."""
    request_id: str | None
    """Recognises a retry; a random one when not given."""
    timeout_s: float | None
    """Seconds for all attempts together; the client's own when not given, math.inf for no deadline."""


_SAMPLING: Mapping[str, check.Check] = {
    "max_tokens": check.UINT32,
    "min_tokens": check.UINT32,
    "temperature": check.number,
    "top_p": check.number,
    "top_k": check.SINT32,
    "min_p": check.number,
    "seed": check.SINT64,
    "stop": check.strings,
    "stop_token_ids": check.token_ids,
    "ignore_eos": check.flag,
    "presence_penalty": check.number,
    "frequency_penalty": check.number,
    "repetition_penalty": check.number,
    "logit_bias": check.bias,
    "allowed_token_ids": check.token_ids,
    "logprobs": check.SINT32,
    "skip_reading_prefix_cache": check.flag,
}
_REQUEST: Mapping[str, check.Check] = {
    "model": check.string,
    "include_stop_str_in_output": check.flag,
    "keep_special_tokens": check.flag,
    "cache_salt": check.string,
    "priority": check.SINT32,
}
_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")
_NAMES = frozenset(get_type_hints(GenerateOptions))
_NOT_PROMPTS = (bytes, bytearray, Mapping, Set)


def build_request(prompt: Prompt, options: Mapping[str, object]) -> GenerateRequest:
    """The message of a request. Absent options stay absent on the wire, zeros that were given stay zeros.

    Raises InvalidRequestError naming the option that does not exist, has a wrong type or does not fit the wire.
    """
    _refuse_unknown(options)
    given = {name: value for name, value in options.items() if value is not None}
    sampling = SamplingParams(**_checked(_SAMPLING, given))
    if (constraint := _constraint(given)) is not None:
        sampling.structured_outputs.CopyFrom(constraint)
    request = GenerateRequest(
        request_id=_request_id(given.get("request_id")), sampling=sampling, **_checked(_REQUEST, given)
    )
    _set_prompt(request, prompt)
    if "template_kwargs" in given:
        _set_template_kwargs(request, given["template_kwargs"])
    return request


def timeout_s(value: object, default_s: float | None) -> float | None:
    """The deadline of a call in seconds, None for no deadline. Raises InvalidRequestError for what is no duration."""
    if value is None:
        return default_s
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
        raise check.wrong("timeout_s", "a positive number of seconds", value)
    return None if value == math.inf else float(value)


def _refuse_unknown(options: Mapping[str, object]) -> None:
    for name in options:
        if name not in _NAMES:
            close = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(_NAMES))}"
            raise InvalidRequestError(f"there is no option {name!r}{hint}")


def _checked(checks: Mapping[str, check.Check], given: Mapping[str, object]) -> dict[str, Any]:
    return {name: checks[name](name, value) for name, value in given.items() if name in checks}


def _request_id(value: object) -> str:
    if value is None:
        return uuid.uuid4().hex
    if not check.string("request_id", value):
        raise InvalidRequestError("request_id must not be empty; leave it out for a random one")
    return str(value)


def _constraint(given: Mapping[str, object]) -> StructuredOutputs | None:
    named = [name for name in _CONSTRAINTS if name in given and given[name] is not False]
    if not named:
        return None
    if len(named) > 1:
        raise InvalidRequestError(f"{' and '.join(named)} exclude each other; give one of them")
    name, value = named[0], given[named[0]]
    if name == "json_schema":
        return StructuredOutputs(json_schema=_schema(value))
    if name == "json_object":
        return StructuredOutputs(json_object=check.flag(name, value))
    if name == "choice":
        texts = check.strings(name, value)
        if isinstance(value, str) or not texts:
            raise check.wrong(name, "a non-empty list of strings", value)
        return StructuredOutputs(choice=Choice(texts=texts))
    if name == "regex":
        return StructuredOutputs(regex=check.string(name, value))
    return StructuredOutputs(grammar=check.string(name, value))


def _schema(value: object) -> str:
    if isinstance(value, str):
        return check.string("json_schema", value)
    if not isinstance(value, Mapping):
        raise check.wrong("json_schema", "a mapping or JSON text", value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"json_schema cannot be written as JSON: {error}") from error


def _set_prompt(request: GenerateRequest, prompt: object) -> None:
    if isinstance(prompt, str):
        request.text = check.string("prompt", prompt)
        return
    items = list(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, _NOT_PROMPTS) else []
    if not items:
        raise check.wrong("prompt", "text, a list of token ids or a list of chat messages", prompt)
    if isinstance(items[0], (Mapping, ChatMessage)):
        request.chat.CopyFrom(ChatMessages(messages=[_message(i, item) for i, item in enumerate(items)]))
    else:
        request.tokens.token_ids.extend(check.token_ids("prompt", items))


def _message(index: int, item: object) -> WireMessage:
    where = f"prompt[{index}]"
    if isinstance(item, ChatMessage):
        item = {"role": item.role, "content": item.content}
    if not isinstance(item, Mapping) or set(item) != {"role", "content"}:
        raise check.wrong(where, "a chat message with 'role' and 'content' and nothing else", item)
    role, content = (check.string(f"{where}[{key!r}]", item[key]) for key in ("role", "content"))
    return WireMessage(role=role, content=content)


def _set_template_kwargs(request: GenerateRequest, value: object) -> None:
    if request.WhichOneof("prompt") != "chat":
        raise InvalidRequestError("template_kwargs needs a prompt of chat messages")
    if not isinstance(value, Mapping):
        raise check.wrong("template_kwargs", "a mapping", value)
    try:
        request.chat.template_kwargs.update(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"template_kwargs must hold JSON values under string keys: {error}") from error
