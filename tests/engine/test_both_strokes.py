"""What prefill and decode are given of one request."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.filterwarnings("ignore")]

UNUSUAL: dict[str, Any] = {
    "temperature": 0.625,
    "top_p": 0.75,
    "top_k": 17,
    "min_p": 0.0625,
    "seed": 4711,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.25,
    "repetition_penalty": 1.125,
    "logprobs": 3,
    "stop_token_ids": [11, 12],
    "logit_bias": {13: -2.5},
    "allowed_token_ids": [11, 12, 13],
    "max_tokens": 500,
    "min_tokens": 100,
}


def both(**sampling: Any) -> list[Any]:
    """The sampling parameters of both strokes."""
    from vllm import SamplingParams

    from twostroke.engine.base import Stroke
    from twostroke.engine.vllm.codec import core_request
    from twostroke.engine.vllm.continuation import continuation
    from twostroke.engine.vllm.sampling import to_wire
    from twostroke.v1.engine_pb2 import EngineRequest

    request = EngineRequest(request_id="r", prompt_token_ids=[1, 2], sampling=to_wire(SamplingParams(**sampling)))
    found = []
    for stroke, chosen in ((Stroke.PREFILL, []), (Stroke.DECODE, [13])):
        request.output_token_ids.extend(chosen)
        made = core_request(request, "r", stroke, sampling["max_tokens"], continuation(request, None), None, None)
        found.append(made.sampling_params)
    return found


@pytest.mark.parametrize("name", sorted(UNUSUAL.keys() - {"max_tokens", "min_tokens"}))
def test_a_sampling_field_reaches_both_strokes_unchanged(name: str) -> None:
    """O-19."""
    assert [getattr(params, name) for params in both(**UNUSUAL)] == [UNUSUAL[name]] * 2


def test_lengths_are_those_of_each_stroke() -> None:
    """O-51: prefill writes one token, which may not end the answer; decode keeps both limits."""
    prefill, decode = both(**UNUSUAL)
    assert (prefill.max_tokens, prefill.min_tokens) == (1, 1)
    assert (decode.max_tokens, decode.min_tokens) == (500, 100)


def test_lengths_count_what_was_appended() -> None:
    _, decode = both(temperature=0, max_tokens=20, min_tokens=5)
    assert (decode.max_tokens, decode.min_tokens) == (19, 4)


def test_prompt_log_probabilities_are_asked_of_prefill_alone() -> None:
    """O-42: they would make decode compute the prompt again."""
    prefill, decode = both(temperature=0, max_tokens=5, prompt_logprobs=2)
    assert (prefill.prompt_logprobs, decode.prompt_logprobs) == (2, None)
    assert (prefill.skip_reading_prefix_cache, decode.skip_reading_prefix_cache) == (True, False)
