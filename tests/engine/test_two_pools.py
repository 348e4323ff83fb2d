"""SmolLM2 on a prefill and a decode worker against one plain vLLM engine."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import httpx
import openai
import pytest

from engine.conftest import MODEL, TwoPools
from twostroke.config import RpcSettings
from twostroke.rpc.channel import connect
from twostroke.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2_grpc
from twostroke.v1.engine_pb2 import SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import ChatMessage, ChatMessages, GenerateRequest, GenerateResponse

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

BLOCK_TOKENS = 128
TOKEN_BYTES = 45 * 1024


@pytest.fixture
async def channel(two_pools: TwoPools) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(two_pools.grpc, RpcSettings()) as channel:
        yield channel


@pytest.fixture
async def client(two_pools: TwoPools) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{two_pools.http}/v1", api_key="none", max_retries=0) as client:
        yield client


async def generate(
    channel: grpc.aio.Channel, prompt: list[int], **sampling: Any
) -> tuple[list[int], str, GenerateResponse]:
    request = GenerateRequest(
        tokens=TokenSequence(token_ids=prompt), sampling=SamplingParams(temperature=0, **sampling)
    )
    tokens: list[int] = []
    text = ""
    last = GenerateResponse()
    async for last in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=300):
        tokens.extend(last.token_ids)
        text += last.text
    return tokens, text, last


async def until_empty(channel: grpc.aio.Channel) -> cluster_pb2.WatchResponse:
    call = cluster_pb2_grpc.ClusterServiceStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=60)
    async for view in call:
        if not view.requests and not any(w.load.used_blocks or w.load.held_handoffs for w in view.workers):
            return view
    raise AssertionError("the watch ended")


async def test_the_kv_really_moved(channel: grpc.aio.Channel) -> None:
    before = await until_empty(channel)
    # Its own numbers: a first block that another test asked for would come out of the prefix cache.
    prompt = [(i * 59) % 30000 + 200 for i in range(700)]
    _, _, last = await generate(channel, prompt, max_tokens=4)
    after = await until_empty(channel)

    def received(view: cluster_pb2.WatchResponse) -> tuple[int, int]:
        decode = next(w.load for w in view.workers if w.info.worker_id == "decode-0")
        return decode.kv_received_bytes, decode.kv_received_handoffs

    blocks = -(-len(prompt) // BLOCK_TOKENS)
    assert received(after)[0] - received(before)[0] == blocks * BLOCK_TOKENS * TOKEN_BYTES
    assert received(after)[1] - received(before)[1] == 1
    assert last.timeline.transferred_tokens == len(prompt)
    assert last.timeline.transferred_bytes == blocks * BLOCK_TOKENS * TOKEN_BYTES
    assert after.recomputed_prompts == 0
    computed = {w.info.worker_id: w.load.computed_prompt_tokens for w in after.workers}
    assert computed["decode-0"] < computed["prefill-0"] / 20


async def test_a_seeded_answer_does_not_depend_on_how_many_steps_the_prompt_took(channel: grpc.aio.Channel) -> None:
    """vLLM's engine ends on the CPU when a seeded prompt gets part of a step. The second time most of it is cached."""
    before = await until_empty(channel)
    request = GenerateRequest(
        tokens=TokenSequence(token_ids=[(i * 61) % 30000 + 200 for i in range(700)]),
        sampling=SamplingParams(temperature=1, seed=7, max_tokens=8, ignore_eos=True),
    )
    answers = []
    for _ in range(2):
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=300)
        answers.append([token async for response in call for token in response.token_ids])
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]
    epochs = [{worker.info.epoch for worker in view.workers} for view in (before, await until_empty(channel))]
    assert epochs[0] == epochs[1]


async def test_two_requests_at_once(channel: grpc.aio.Channel) -> None:
    prompts = [[(i * 41) % 30000 + 200 for i in range(length)] for length in (100, 300)]
    alone = [await generate(channel, prompt, max_tokens=16) for prompt in prompts]
    together = await asyncio.gather(*(generate(channel, prompt, max_tokens=16) for prompt in prompts))
    assert [answer[0] for answer in together] == [answer[0] for answer in alone]


async def test_streaming_and_not_streaming_say_the_same(client: openai.AsyncOpenAI) -> None:
    ask: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 30,
    }
    whole = await client.chat.completions.create(**ask)
    stream = await client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content == "The capital of France is Paris."
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


async def test_n_2_stop_strings_and_log_probabilities_work_over_http(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="One, two, three,", n=2, temperature=0.01, seed=1, max_tokens=12, logprobs=2, stop=[" six"]
    )
    assert len(answer.choices) == 2
    for choice in answer.choices:
        assert choice.text == " four, five,"
        assert choice.finish_reason == "stop"
        assert choice.logprobs is not None
        assert choice.logprobs.tokens is not None
        assert "".join(choice.logprobs.tokens).startswith(choice.text)


async def test_responses_messages_and_structured_outputs_go_through_two_pools(client: openai.AsyncOpenAI) -> None:
    question = "What is the capital of France?"
    response = await client.responses.create(model=MODEL, input=question, temperature=0, max_output_tokens=20)
    assert response.output_text == "The capital of France is Paris."
    body = {"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 20}
    message = await client.post("/messages", body=body, cast_to=httpx.Response)
    assert message.json()["content"][0]["text"] == "The capital of France is Paris."
    chosen = await client.completions.create(
        model=MODEL,
        prompt="Answer:",
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["red", "blue"]}},
    )
    assert chosen.choices[0].text in ("red", "blue")


async def test_text_and_chat_over_grpc(channel: grpc.aio.Channel) -> None:
    async def text_of(request: GenerateRequest) -> str:
        call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=60)
        return "".join([piece.text async for piece in call])

    chat = ChatMessages(messages=[ChatMessage(role="user", content="What is the capital of France?")])
    greedy = SamplingParams(temperature=0, max_tokens=20, stop=[" 6"])
    assert await text_of(GenerateRequest(chat=chat, sampling=greedy)) == "The capital of France is Paris."
    assert await text_of(GenerateRequest(text="Count: 1, 2, 3,", sampling=greedy)) == " 4, 5,"


async def test_a_prompt_longer_than_the_model_is_a_400_that_names_the_limit(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="2048"):
        await client.completions.create(model=MODEL, prompt=[5] * 9000, max_tokens=1)


async def test_an_unknown_model_is_a_404_that_names_it(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        await client.completions.create(model="gpt-9", prompt="hello")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True, "remote_host": "10.0.0.1"}}, "vllm_xargs|kv_transfer"),
        ({"vllm_xargs": {"twostroke_forced_token_ids": [1]}}, "vllm_xargs"),
    ],
    ids=["a hand-off from outside", "extra arguments"],
)
async def test_what_is_not_served_is_refused_by_name(
    client: openai.AsyncOpenAI, extra: dict[str, Any], named: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=named):
        await client.completions.create(model=MODEL, prompt="hello", max_tokens=2, extra_body=extra)


@pytest.mark.parametrize("pieces", [1, 8], ids=["after the first token", "in decode"])
async def test_an_abort_frees_blocks_on_both_sides(channel: grpc.aio.Channel, pieces: int) -> None:
    request = GenerateRequest(
        tokens=TokenSequence(token_ids=[(i * 11) % 9000 + 300 for i in range(400 + pieces)]),
        sampling=SamplingParams(max_tokens=2000, temperature=0, ignore_eos=True),
    )
    calls = [inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120) for _ in range(3)]
    for call in calls:
        for _ in range(pieces):
            await call.read()
    for call in calls:
        call.cancel()
    view = await until_empty(channel)
    assert all(not w.load.running_requests for w in view.workers)


async def test_an_abort_in_prefill_frees_blocks(channel: grpc.aio.Channel) -> None:
    request = GenerateRequest(
        tokens=TokenSequence(token_ids=[(i * 13) % 9000 + 300 for i in range(2000)]),
        sampling=SamplingParams(max_tokens=20, temperature=0),
    )
    call = inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=120)
    asked = asyncio.create_task(call.read())
    watch = cluster_pb2_grpc.ClusterServiceStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=60)
    async for view in watch:
        if any(w.load.used_blocks and w.info.worker_id == "prefill-0" for w in view.workers):
            break
    call.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    view = await until_empty(channel)
    assert not any(w.load.running_requests for w in view.workers)
