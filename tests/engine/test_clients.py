"""Clients that people use, unmodified."""

import json
import os
import subprocess
import sys
from pathlib import Path

import anthropic
import openai
import pytest
from pydantic import BaseModel

from engine.conftest import MODEL, Engines, TwoPools

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 12}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


class City(BaseModel):
    """What the structured output is parsed into."""

    name: str
    large: bool


@pytest.fixture
def sync_openai(two_pools: TwoPools) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{two_pools.http}/v1", api_key="none", max_retries=0)


@pytest.fixture
def sync_anthropic(two_pools: TwoPools) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=two_pools.http, api_key="none", max_retries=0)


def test_openai_chat_stream_and_models(sync_openai: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 20}
    assert sync_openai.models.list().data[0].id == MODEL
    whole = sync_openai.chat.completions.create(**ask)  # type: ignore[call-overload]
    assert whole.choices[0].message.content == ANSWER
    with sync_openai.chat.completions.stream(**ask) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    assert len(events) > 5
    assert final.choices[0].message.content == ANSWER


def test_openai_tools(sync_openai: openai.OpenAI) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Weather in Paris?"}], "tools": TOOLS}
    answer = sync_openai.chat.completions.create(**ask, tool_choice="required", temperature=0, max_tokens=60)  # type: ignore[call-overload]
    call = answer.choices[0].message.tool_calls[0]
    assert call.function.name == "get_weather"
    assert {*json.loads(call.function.arguments)} == {"city"}


def test_openai_structured_outputs(sync_openai: openai.OpenAI) -> None:
    answer = sync_openai.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "A city as JSON."}],
        response_format=City,
        temperature=0,
        max_tokens=100,
    )
    assert isinstance(answer.choices[0].message.parsed, City)


async def test_openai_async(two_pools: TwoPools) -> None:
    async with openai.AsyncOpenAI(base_url=f"{two_pools.http}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20)
        assert response.output_text == ANSWER
        stream = await client.responses.create(
            model=MODEL, input=QUESTION, temperature=0, max_output_tokens=20, stream=True
        )
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ANSWER


def test_openai_errors(sync_openai: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="vllm_xargs"):
        sync_openai.completions.create(model=MODEL, prompt="Hi", stream=True, extra_body={"vllm_xargs": {"a": 1}})


def test_anthropic_messages(sync_anthropic: anthropic.Anthropic) -> None:
    ask = {"model": MODEL, "max_tokens": 20, "messages": [{"role": "user", "content": QUESTION}]}
    ask["extra_body"] = {"temperature": 0}
    whole = sync_anthropic.messages.create(**ask)  # type: ignore[call-overload]
    assert whole.content[0].text == ANSWER
    assert whole.stop_reason == "end_turn"
    with sync_anthropic.messages.stream(**ask) as stream:  # type: ignore[arg-type]
        assert "".join(stream.text_stream) == ANSWER
        assert stream.get_final_message().usage.output_tokens == whole.usage.output_tokens
    assert sync_anthropic.messages.count_tokens(model=MODEL, messages=ask["messages"]).input_tokens > 5  # type: ignore[arg-type]


def test_anthropic_errors(sync_anthropic: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError):
        sync_anthropic.messages.create(model="gpt-9", max_tokens=3, messages=[{"role": "user", "content": "Hi"}])


def test_vllm_bench_serve(two_pools: TwoPools, engines: Engines, tmp_path: Path) -> None:
    """As docs/clients.md says."""
    script = (
        "from vllm.utils.argparse_utils import FlexibleArgumentParser as P\n"
        "from vllm.benchmarks.serve import add_cli_args, main\n"
        "p = P(); add_cli_args(p); main(p.parse_args())\n"
    )
    command = [sys.executable, "-c", script, "--backend", "openai-chat", "--base-url", two_pools.http]
    command += ["--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", engines.model]
    command += ["--dataset-name", "random", "--random-input-len", "50", "--random-output-len", "8"]
    command += ["--num-prompts", "6", "--max-concurrency", "2", "--ignore-eos", "--save-result"]
    command += ["--result-dir", str(tmp_path), "--result-filename", "result.json", "--disable-tqdm"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["total_output_tokens"]) == (6, 48)
