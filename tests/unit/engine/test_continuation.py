"""Which requests go on by appending the tokens that they have, and which must take those steps again."""

from typing import Any

import pytest

from twostroke.engine.vllm.continuation import Continuation, continuation, depends_on_output
from twostroke.v1.engine_pb2 import (
    EngineRequest,
    RepetitionDetection,
    SamplingParams,
    StructuredOutputs,
    TokenSequence,
)
from twostroke.v1.kv_pb2 import Handoff

INDEPENDENT: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy with a seed": {"temperature": 0, "seed": 3},
    "sampled without a seed": {"temperature": 0.8, "top_p": 0.9, "top_k": 5, "min_p": 0.1},
    "repetition penalty": {"temperature": 0, "repetition_penalty": 1.3},
    "limits": {"temperature": 0, "max_tokens": 9, "min_tokens": 4, "stop_token_ids": [5]},
    "bias": {"temperature": 0, "logit_bias": {4: 2.0}, "allowed_token_ids": [1, 2]},
    "penalties of nothing": {"temperature": 0, "presence_penalty": 0, "frequency_penalty": 0},
    "log probabilities": {"temperature": 0, "logprobs": 3, "prompt_logprobs": 1},
}
DEPENDENT: dict[str, dict[str, Any]] = {
    "seed": {"temperature": 0.8, "seed": 3},
    "seed at the default temperature": {"seed": 3},
    "presence penalty": {"presence_penalty": 0.5},
    "frequency penalty": {"frequency_penalty": -0.5},
    "bad words": {"bad_words": [TokenSequence(token_ids=[1, 2])]},
    "grammar": {"structured_outputs": StructuredOutputs(regex="a+")},
    "thinking budget": {"thinking_token_budget": 8},
    "repetition detection": {"repetition_detection": RepetitionDetection(max_pattern_size=3, min_count=2)},
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_tokens_are_appended_where_only_they_matter(name: str) -> None:
    request = EngineRequest(output_token_ids=[7, 8], sampling=SamplingParams(**INDEPENDENT[name]))
    assert continuation(request, None) == Continuation(appended=(7, 8))


@pytest.mark.parametrize("name", DEPENDENT)
def test_steps_are_taken_again_where_the_engine_keeps_something_about_its_output(name: str) -> None:
    request = EngineRequest(output_token_ids=[7, 8], sampling=SamplingParams(**DEPENDENT[name]))
    assert continuation(request, None) == Continuation(forced=(7, 8))


def test_every_sampling_field_was_thought_of() -> None:
    """A field that the wire gains is in neither table, and this fails until someone says what it depends on."""
    named = {name for table in (INDEPENDENT, DEPENDENT) for values in table.values() for name in values}
    # Ends of text and stop strings end answers, they choose nothing; the rest is about caches and about what is shown.
    others = {"eos_token_id", "all_stop_token_ids", "ignore_eos", "stop", "skip_reading_prefix_cache"}
    assert {field.name for field in SamplingParams.DESCRIPTOR.fields} == named | others | {"logprob_token_ids"}


def test_a_request_without_tokens_goes_on_from_nothing() -> None:
    request = EngineRequest(sampling=SamplingParams(seed=1))
    assert continuation(request, None) == Continuation()
    assert depends_on_output(request.sampling)


@pytest.mark.parametrize("in_progress", [False, True])
def test_a_token_that_is_yet_to_come_is_forced_only_where_it_must_be(in_progress: bool) -> None:
    handoff = Handoff(in_progress=in_progress)
    greedy = EngineRequest(sampling=SamplingParams(temperature=0))
    assert continuation(greedy, handoff) == Continuation(brought=in_progress)
    seeded = EngineRequest(sampling=SamplingParams(seed=1))
    assert continuation(seeded, handoff) == Continuation(brought=in_progress, forces_brought=in_progress)
