"""SamplingParams of vLLM to and from the wire.

Every field of vLLM's class is in exactly one of three tables: it travels, the front end alone uses it, or it is refused
by name when a request sets it. A field that a new vLLM adds is in none, and the contract test fails.
"""

from __future__ import annotations

import json
from typing import Any, cast

from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from twostroke.errors import UnsupportedFieldError
from twostroke.v1 import engine_pb2 as pb

# Same name and meaning on the wire.
PLAIN_FIELDS = (
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
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_reading_prefix_cache",
    "thinking_token_budget",
)
LIST_FIELDS = ("stop_token_ids", "logprob_token_ids", "allowed_token_ids")
# These travel too, each in its own way below.
SPECIAL_FIELDS = (
    "logit_bias",
    "structured_outputs",
    "repetition_detection",
    "_eos_token_id",
    "_all_stop_token_ids",
    "_bad_words_token_ids",
)
# The front end's own business: it has fanned out n, matches stop strings, and makes text.
FRONT_END_FIELDS = (
    "n",
    "stop",
    "bad_words",
    "flat_logprobs",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "output_kind",
    "stream_interval",
    "skip_clone",
    "output_text_buffer_length",
)
# What an engine of the cluster does not do, with the value that asks for nothing.
REFUSED_FIELDS: dict[str, Any] = {
    "watermarking": False,
    "_watermarking_skipped": False,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "extra_args": None,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": None,
}


def to_wire(params: SamplingParams) -> pb.SamplingParams:
    """Encodes. Raises UnsupportedFieldError naming the first field that cannot be served."""
    for name, nothing in REFUSED_FIELDS.items():
        value = getattr(params, name)
        # vLLM's responses route sets an empty dictionary where nothing was asked for.
        unset = value is None or (isinstance(value, dict) and not value)
        if not unset and (nothing is None or value != nothing):
            public = {"extra_args": "vllm_xargs"}.get(name, name.lstrip("_"))
            raise UnsupportedFieldError(f"{public} is not supported through two pools; leave it out")
    wire = pb.SamplingParams()
    for name in PLAIN_FIELDS:
        if (value := getattr(params, name)) is not None:
            setattr(wire, name, value)
    for name in LIST_FIELDS:
        getattr(wire, name).extend(getattr(params, name) or ())
    wire.all_stop_token_ids.extend(sorted(params._all_stop_token_ids))
    if params._eos_token_id is not None:
        wire.eos_token_id = params._eos_token_id
    for token, bias in (params.logit_bias or {}).items():
        wire.logit_bias[int(token)] = bias
    for sequence in params._bad_words_token_ids or ():
        wire.bad_words.add(token_ids=sequence)
    if params.structured_outputs is not None:
        wire.structured_outputs.CopyFrom(_structured_to_wire(params.structured_outputs))
    if params.repetition_detection is not None:
        wire.repetition_detection.CopyFrom(
            pb.RepetitionDetection(
                max_pattern_size=params.repetition_detection.max_pattern_size,
                min_pattern_size=params.repetition_detection.min_pattern_size,
                min_count=params.repetition_detection.min_count,
            )
        )
    return wire


def from_wire(wire: pb.SamplingParams) -> SamplingParams:
    """Decodes. Raises ValueError for values out of range, as vLLM's own class does."""
    # vLLM's default of 16 for max_tokens is not ours: absent is no limit.
    plain = {"max_tokens": None} | {
        name: getattr(wire, name) for name in PLAIN_FIELDS if wire.HasField(cast("Any", name))
    }
    lists = {name: list(values) for name in LIST_FIELDS if (values := getattr(wire, name))}
    repetition = wire.repetition_detection if wire.HasField("repetition_detection") else None
    params = SamplingParams(
        **plain,
        **lists,
        logit_bias=dict(wire.logit_bias) or None,
        structured_outputs=_structured_from_wire(wire.structured_outputs)
        if wire.HasField("structured_outputs")
        else None,
        repetition_detection=RepetitionDetectionParams(
            repetition.max_pattern_size, repetition.min_pattern_size, repetition.min_count
        )
        if repetition
        else None,
        detokenize=False,
        watermarking=False,
    )
    params._eos_token_id = wire.eos_token_id if wire.HasField("eos_token_id") else None
    params._all_stop_token_ids = set(wire.all_stop_token_ids) | set(wire.stop_token_ids)
    params._bad_words_token_ids = [list(sequence.token_ids) for sequence in wire.bad_words] or None
    return params


def _structured_to_wire(params: StructuredOutputsParams) -> pb.StructuredOutputs:
    wire = pb.StructuredOutputs(
        disable_any_whitespace=params.disable_any_whitespace,
        disable_additional_properties=params.disable_additional_properties,
        whitespace_pattern=params.whitespace_pattern,
        backend=params._backend,
        backend_was_auto=params._backend_was_auto,
    )
    if params.json is not None:
        wire.json_schema = params.json if isinstance(params.json, str) else json.dumps(params.json)
    elif params.regex is not None:
        wire.regex = params.regex
    elif params.choice is not None:
        wire.choice.CopyFrom(pb.Choice(texts=params.choice))
    elif params.grammar is not None:
        wire.grammar = params.grammar
    elif params.json_object is not None:
        wire.json_object = params.json_object
    elif params.structural_tag is not None:
        wire.structural_tag = params.structural_tag
    return wire


def _structured_from_wire(wire: pb.StructuredOutputs) -> StructuredOutputsParams:
    kind = wire.WhichOneof("constraint")
    value: Any = getattr(wire, kind) if kind else None
    name = {"json_schema": "json"}.get(str(kind), str(kind))
    params = StructuredOutputsParams(
        **{name: list(value.texts) if kind == "choice" else value},
        disable_any_whitespace=wire.disable_any_whitespace,
        disable_additional_properties=wire.disable_additional_properties,
        whitespace_pattern=wire.whitespace_pattern if wire.HasField("whitespace_pattern") else None,
    )
    params._backend = wire.backend if wire.HasField("backend") else None
    params._backend_was_auto = wire.backend_was_auto
    return params
