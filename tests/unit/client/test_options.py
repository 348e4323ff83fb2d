"""Every option reaches the wire, and nothing else does."""

import json
import math
from typing import get_type_hints

import numpy as np
import pytest

from twostroke.client import ChatMessage, GenerateOptions, InvalidRequestError
from twostroke.client._options import build_request, timeout_s
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2 import ChatMessages, GenerateRequest

CHAT = [{"role": "user", "content": "hi"}]

# Option, value, field path on the wire, value there. A zero or an empty value that was given must be kept.
WIRE = [
    ("model", "m", "model", "m"),
    ("max_tokens", 7, "sampling.max_tokens", 7),
    ("max_tokens", 0, "sampling.max_tokens", 0),
    ("min_tokens", 0, "sampling.min_tokens", 0),
    ("temperature", 0.5, "sampling.temperature", 0.5),
    ("temperature", 0, "sampling.temperature", 0.0),
    ("temperature", np.float32(0.25), "sampling.temperature", 0.25),
    ("top_p", 0.0, "sampling.top_p", 0.0),
    ("top_k", 0, "sampling.top_k", 0),
    ("top_k", -1, "sampling.top_k", -1),
    ("min_p", 0.0, "sampling.min_p", 0.0),
    ("seed", 0, "sampling.seed", 0),
    ("seed", -(2**63), "sampling.seed", -(2**63)),
    ("stop", "END", "sampling.stop", ["END"]),
    ("stop", ("a", "b"), "sampling.stop", ["a", "b"]),
    ("stop_token_ids", [0, 5], "sampling.stop_token_ids", [0, 5]),
    ("include_stop_str_in_output", True, "include_stop_str_in_output", True),
    ("ignore_eos", False, "sampling.ignore_eos", False),
    ("presence_penalty", 0.0, "sampling.presence_penalty", 0.0),
    ("frequency_penalty", -1.5, "sampling.frequency_penalty", -1.5),
    ("repetition_penalty", 1.5, "sampling.repetition_penalty", 1.5),
    ("logit_bias", {0: -2, 9: 0.5}, "sampling.logit_bias", {0: -2.0, 9: 0.5}),
    ("allowed_token_ids", (1, 2), "sampling.allowed_token_ids", [1, 2]),
    ("logprobs", 0, "sampling.logprobs", 0),
    ("logprobs", np.int64(3), "sampling.logprobs", 3),
    ("json_schema", {"type": "object"}, "sampling.structured_outputs.json_schema", json.dumps({"type": "object"})),
    ("json_schema", '{"type":"null"}', "sampling.structured_outputs.json_schema", '{"type":"null"}'),
    ("json_object", True, "sampling.structured_outputs.json_object", True),
    ("regex", "a+", "sampling.structured_outputs.regex", "a+"),
    ("choice", ["yes", "no"], "sampling.structured_outputs.choice.texts", ["yes", "no"]),
    ("grammar", 'root ::= "x"', "sampling.structured_outputs.grammar", 'root ::= "x"'),
    ("keep_special_tokens", True, "keep_special_tokens", True),
    ("template_kwargs", {"thinking": False, "n": 2}, "chat.template_kwargs", {"thinking": False, "n": 2}),
    ("cache_salt", "", "cache_salt", ""),
    ("skip_reading_prefix_cache", True, "sampling.skip_reading_prefix_cache", True),
    ("priority", -3, "priority", -3),
    ("request_id", "r-1", "request_id", "r-1"),
]

# Fields that are no option: the front end knows the model's end of text; the answer has no place for log probabilities
# of the prompt or of chosen tokens; the rest belongs to the engine.
NOT_OFFERED = {
    "all_stop_token_ids",
    "bad_words",
    "eos_token_id",
    "logprob_token_ids",
    "prompt_logprobs",
    "repetition_detection",
    "structured_outputs",
    "thinking_token_budget",
}


def set_paths(message, prefix=""):
    """The paths of all fields that are present on the wire, down to scalars, lists and maps."""
    paths = set()
    for field, value in message.ListFields():
        path = prefix + field.name
        nested = field.message_type and not field.is_repeated and field.message_type.name != "Struct"
        paths |= set_paths(value, path + ".") if nested else {path}
    return paths


@pytest.mark.parametrize(("option", "value", "path", "expected"), WIRE)
def test_an_option_sets_its_field_and_no_other(option, value, path, expected):
    prompt = CHAT if option == "template_kwargs" else "p"
    request = build_request(prompt, {"request_id": "r-1", option: value})
    found = request
    for name in path.split("."):
        assert name in found.DESCRIPTOR.fields_by_name
        found = getattr(found, name)
    assert (dict(found) if isinstance(expected, dict) else list(found) if isinstance(expected, list) else found) == (
        expected
    )
    assert set_paths(request) == {"request_id", path, "chat.messages" if prompt is CHAT else "text"}


def test_the_table_covers_every_option():
    assert {row[0] for row in WIRE} | {"timeout_s"} == set(get_type_hints(GenerateOptions))


def test_every_field_of_the_wire_is_an_option_or_left_out_on_purpose():
    wire = {row[2].removeprefix("sampling.").split(".")[0] for row in WIRE}
    assert {field.name for field in SamplingParams.DESCRIPTOR.fields} - wire == NOT_OFFERED - {"structured_outputs"}
    assert {field.name for field in GenerateRequest.DESCRIPTOR.fields} - wire == {"text", "tokens", "sampling"}


def test_nothing_given_is_nothing_sent():
    none = dict.fromkeys(get_type_hints(GenerateOptions))
    for options in ({}, none, {"stop": (), "stop_token_ids": [], "logit_bias": {}, "json_object": False}):
        assert set_paths(build_request("p", options)) == {"request_id", "text"}


def test_a_request_without_an_id_gets_one_of_its_own():
    first, second = build_request("p", {}).request_id, build_request("p", {}).request_id
    assert len(first) == 32
    assert first != second


def test_prompts():
    assert build_request("text", {}).text == "text"
    assert build_request("", {}).WhichOneof("prompt") == "text"
    assert list(build_request([1, 0, 2], {}).tokens.token_ids) == [1, 0, 2]
    assert list(build_request(np.array([3, 4]), {}).tokens.token_ids) == [3, 4]
    conversation = [ChatMessage("system", "be brief"), {"role": "user", "content": "hi"}]
    expected = ChatMessages()
    expected.messages.add(role="system", content="be brief")
    expected.messages.add(role="user", content="hi")
    assert build_request(conversation, {}).chat == expected


@pytest.mark.parametrize(
    ("prompt", "named"),
    [
        (None, "prompt"),
        (7, "prompt"),
        ([], "prompt"),
        (b"bytes", "prompt"),
        ({"role": "user", "content": "hi"}, "prompt"),
        ({1, 2}, "prompt"),
        ("\ud800", "prompt"),
        ([1, "a"], "prompt"),
        ([1, True], "prompt"),
        ([1, -1], "prompt"),
        ([1, 2**32], "prompt"),
        ([{"role": "user"}], "prompt[0]"),
        ([{"role": "user", "content": "a", "name": "b"}], "prompt[0]"),
        ([*CHAT, 3], "prompt[1]"),
        ([*CHAT, {"role": "user", "content": [{"type": "text"}]}], "prompt[1]['content']"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_named(prompt, named):
    with pytest.raises(InvalidRequestError) as caught:
        build_request(prompt, {})
    assert str(caught.value).startswith(f"{named} must be ")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("model", 3),
        ("max_tokens", "7"),
        ("max_tokens", 7.0),
        ("max_tokens", True),
        ("max_tokens", -1),
        ("max_tokens", 2**32),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 1e39),
        ("temperature", 10**400),
        ("top_k", 1.5),
        ("seed", 2**63),
        ("stop", 3),
        ("stop", ["a", 3]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", [1.5]),
        ("stop_token_ids", 5),
        ("ignore_eos", 1),
        ("logit_bias", [1, 2]),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: "a"}),
        ("logprobs", True),
        ("json_schema", 5),
        ("json_object", "yes"),
        ("regex", 5),
        ("choice", "yes"),
        ("choice", []),
        ("choice", [1]),
        ("grammar", b"x"),
        ("cache_salt", 1),
        ("priority", "high"),
        ("request_id", 5),
        ("request_id", ""),
    ],
)
def test_a_value_of_a_wrong_type_names_its_option(option, value):
    with pytest.raises(InvalidRequestError) as caught:
        build_request("p", {option: value})
    assert str(caught.value).startswith(option)
    assert len(str(caught.value)) < 250


def test_an_unknown_option_is_named_with_a_guess():
    with pytest.raises(InvalidRequestError, match=r"no option 'max_new_tokens'; did you mean '\w+_tokens'"):
        build_request("p", {"max_new_tokens": 3})
    with pytest.raises(InvalidRequestError, match=r"no option 'zzz'; there are allowed_token_ids, .*, top_p"):
        build_request("p", {"zzz": None})


def test_constraints_exclude_each_other():
    with pytest.raises(InvalidRequestError, match=r"json_schema and regex exclude each other"):
        build_request("p", {"regex": "a", "json_schema": {}})


def test_json_that_cannot_be_written_is_named():
    with pytest.raises(InvalidRequestError, match=r"json_schema cannot be written as JSON"):
        build_request("p", {"json_schema": {"type": object}})
    with pytest.raises(InvalidRequestError, match=r"template_kwargs must hold JSON values"):
        build_request(CHAT, {"template_kwargs": {"tools": object()}})


def test_template_kwargs_need_a_conversation():
    with pytest.raises(InvalidRequestError, match=r"template_kwargs needs a prompt of chat messages"):
        build_request("p", {"template_kwargs": {}})
    with pytest.raises(InvalidRequestError, match=r"template_kwargs must be a mapping"):
        build_request(CHAT, {"template_kwargs": [1]})


def test_the_deadline_of_a_call():
    assert timeout_s(None, None) is None
    assert timeout_s(None, 5.0) == 5.0
    assert timeout_s(2, 5.0) == 2.0
    assert timeout_s(math.inf, 5.0) is None


@pytest.mark.parametrize("value", [0, -1, "5", True, math.nan])
def test_a_deadline_that_is_no_duration_is_named(value):
    with pytest.raises(InvalidRequestError, match=r"timeout_s must be a positive number of seconds"):
        timeout_s(value, None)
