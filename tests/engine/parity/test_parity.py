"""The parity table: every row asked of one plain vLLM engine and of two pools, compared field by field."""

import json
from typing import Any

import pytest

from engine.parity.conftest import NAMES, Judged
from twostroke.bench.parity.run import Outcome

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.mark.parametrize("name", NAMES)
def test_two_pools_answer_as_one_engine(name: str, outcomes: dict[str, Outcome]) -> None:
    """Among them O-17 (grammars), O-20 (stop strings in pieces), O-22 (characters in pieces), O-34 (n = 3)."""
    assert outcomes[name].problems == []


def test_a_streamed_answer_says_what_the_whole_one_says(outcomes: dict[str, Outcome]) -> None:
    """O-23: tool calls, reasoning and texts do not depend on how the answer was cut into pieces."""
    compared = 0
    for name, outcome in outcomes.items():
        streamed = outcomes.get(f"{name}, streamed")
        if streamed is None or "choices" not in outcome.two:
            continue
        compared += 1
        for whole, pieces in zip(outcome.two["choices"], streamed.two["choices"], strict=True):
            assert _essence(pieces) == _essence(whole), name
    assert compared > 20


def _essence(choice: dict[str, object]) -> object:
    message = choice.get("message")
    said = message if isinstance(message, dict) else choice
    calls = [(call["function"]["name"], _value(call)) for call in said.get("tool_calls") or () if call]
    texts = [said.get(key) or "" for key in ("text", "content", "reasoning")]
    return choice.get("token_ids"), choice["finish_reason"], texts, calls


def _value(call: dict[str, Any]) -> object:
    # vLLM writes the arguments of a forced call anew when it answers whole, so that the white space differs there.
    arguments = call["function"]["arguments"]
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def test_the_pools_really_shared_the_work(judged: Judged) -> None:
    prefill, decode = judged.prefill, judged.decode
    assert prefill.computed_prompt_tokens > 4000
    assert decode.generated_tokens > 800
    assert decode.computed_prompt_tokens < prefill.computed_prompt_tokens / 10
    assert judged.recomputed_prompts == 0
