"""Whole answers through two pools of reference workers, checked against the pure function they compute."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from cluster.reference_cluster import Cluster, request, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import (
    InvalidRequestError,
    PromptTooLongError,
    TwostrokeError,
    UnknownModelError,
    UnsupportedFieldError,
)
from twostroke.rpc.status import to_error
from twostroke.v1 import inference_pb2_grpc
from twostroke.v1.engine_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    SamplingParams,
    StructuredOutputs,
    TokenSequence,
)
from twostroke.v1.inference_pb2 import GenerateRequest, ListModelsRequest

BLOCK_TOKENS = 16


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running(prefill=2, decode=2) as cluster:
        yield cluster


pytestmark = pytest.mark.asyncio(loop_scope="module")


def prompt(length: int, salt: int = 0) -> list[int]:
    return [(i * 7919 + length * 31 + salt) % 40000 for i in range(length)]


@pytest.mark.parametrize("length", [1, 2, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, 100, 1000, 5000])
async def test_an_answer_equals_one_engine(cluster: Cluster, length: int) -> None:
    answer = await cluster.ask(request(prompt(length), 20))
    assert answer.token_ids == expected_tokens(prompt(length), SamplingParams(temperature=0), 20)
    assert answer.last.finish.reason == FINISH_REASON_LENGTH
    assert (answer.last.usage.prompt_tokens, answer.last.usage.completion_tokens) == (length, 20)
    assert answer.last.usage.cached_tokens == 0
    timeline = answer.last.timeline
    assert timeline.prefill_worker_id.startswith("prefill-")
    assert timeline.decode_worker_id.startswith("decode-")
    assert timeline.transferred_tokens == length
    assert timeline.decode_computed_tokens <= BLOCK_TOKENS
    assert timeline.transferred_bytes >= length * 16
    moments = [timeline.placed_ms, timeline.prefill_started_ms, timeline.first_token_ms, timeline.finished_ms]
    assert moments == sorted(moments)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_few_tokens_are_exactly_as_many(cluster: Cluster, max_tokens: int) -> None:
    answer = await cluster.ask(request(prompt(40, max_tokens), max_tokens))
    assert answer.token_ids == expected_tokens(prompt(40, max_tokens), SamplingParams(temperature=0), max_tokens)
    assert answer.last.finish.reason == FINISH_REASON_LENGTH
    used_decode = bool(answer.last.timeline.decode_worker_id)
    assert used_decode == (max_tokens > 1), "one token needs no decode worker"


async def test_a_first_token_that_ends_the_text_ends_the_answer(cluster: Cluster) -> None:
    first = expected_tokens(prompt(33), SamplingParams(temperature=0), 1)[0]
    answer = await cluster.ask(request(prompt(33), 50, eos_token_id=first))
    assert answer.token_ids == [first]
    assert answer.last.finish.reason == FINISH_REASON_STOP
    assert answer.last.timeline.decode_worker_id == ""
    await cluster.empty()


async def test_a_stop_token_on_decode_ends_the_answer(cluster: Cluster) -> None:
    tokens = expected_tokens(prompt(34), SamplingParams(temperature=0), 10)
    answer = await cluster.ask(request(prompt(34), 50, stop_token_ids=[tokens[6]]))
    assert answer.token_ids == tokens[:7]
    assert answer.last.finish.stop_token_id == tokens[6]


async def test_seeded_sampling_equals_one_engine(cluster: Cluster) -> None:
    sampling = SamplingParams(temperature=0.8, seed=42, max_tokens=20)
    wanted = GenerateRequest(tokens=TokenSequence(token_ids=prompt(50)), sampling=sampling)
    assert (await cluster.ask(wanted)).token_ids == expected_tokens(prompt(50), sampling, 20)


async def test_log_probabilities_cover_every_token_the_first_included(cluster: Cluster) -> None:
    answer = await cluster.ask(request(prompt(60), 5, logprobs=2))
    columns = {piece.logprobs.columns for piece in answer.pieces}
    chosen = [token for piece in answer.pieces for token in piece.logprobs.token_ids[::3]]
    assert columns == {3}
    assert chosen == answer.token_ids


async def test_many_at_once(cluster: Cluster) -> None:
    """O-37: token ids alone, which no policy can look into, go wherever there is room."""
    prompts = [prompt(10 + 7 * i, i) for i in range(48)]
    answers = await asyncio.gather(*(cluster.ask(request(tokens, 12)) for tokens in prompts))
    for tokens, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == expected_tokens(tokens, SamplingParams(temperature=0), 12)
    used = {(a.last.timeline.prefill_worker_id, a.last.timeline.decode_worker_id) for a in answers}
    assert {pair[0] for pair in used} == {"prefill-0", "prefill-1"}
    assert {pair[1] for pair in used} == {"decode-0", "decode-1"}
    await cluster.empty()


async def test_a_full_prefix_hit_on_both_sides_still_frees_prefill(cluster: Cluster) -> None:
    tokens = prompt(64, 5)
    first, second = [await cluster.ask(request(tokens, 8)) for _ in range(2)]
    assert first.token_ids == second.token_ids == expected_tokens(tokens, SamplingParams(temperature=0), 8)
    await cluster.empty()


async def leave(cluster: Cluster, prompt_tokens: list[int], pieces: int) -> None:
    """Reads so many pieces of a long answer and goes."""
    stream = cluster.stream(request(prompt_tokens, 20_000))
    for _ in range(pieces):
        await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("pieces", [1, 2, 6], ids=["after the first token", "early in decode", "in decode"])
async def test_a_client_that_leaves_frees_everything(cluster: Cluster, pieces: int) -> None:
    await asyncio.gather(*(leave(cluster, prompt(500, 100 + i), pieces) for i in range(10)))
    await cluster.empty()


async def test_a_client_that_leaves_before_the_first_token_frees_everything(cluster: Cluster) -> None:
    tasks = [asyncio.create_task(leave(cluster, prompt(30_000, 200 + i), 1)) for i in range(6)]
    await cluster.until(lambda view: view.requests == 6)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await cluster.empty()
    assert (await cluster.ask(request([1, 2, 3], 2))).token_ids, "the next request does not wait behind them"


BAD = {
    "an empty prompt": (GenerateRequest(tokens=TokenSequence()), InvalidRequestError, "empty"),
    "no prompt at all": (GenerateRequest(), InvalidRequestError, "token ids"),
    "text without a tokenizer": (GenerateRequest(text="hello"), InvalidRequestError, "--front-end vllm"),
    "an unknown model": (
        GenerateRequest(model="gpt-9", tokens=TokenSequence(token_ids=[1])),
        UnknownModelError,
        "'gpt-9'.*there is reference",
    ),
    "a token id beyond the vocabulary": (request([1, 4_000_000]), InvalidRequestError, "4000000.*49152"),
    "a prompt longer than the model": (request([1] * 40_000), PromptTooLongError, "40000.*32768"),
    "a field the engine does not do": (
        request([1, 2], structured_outputs=StructuredOutputs(regex="a+")),
        UnsupportedFieldError,
        "structured_outputs",
    ),
}


@pytest.mark.parametrize("case", BAD, ids=str)
async def test_bad_input_is_one_clear_line(cluster: Cluster, case: str) -> None:
    wanted, kind, message = BAD[case]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(wanted)
    error = to_error(caught.value)
    assert isinstance(error, kind), error
    with pytest.raises(TwostrokeError, match=message):
        raise error
    assert "\n" not in error.message
    assert (await cluster.ask(request([1, 2, 3], 2))).token_ids, "the next request works"


async def test_list_models(cluster: Cluster) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(cluster.channel)
    models = (await stub.ListModels(ListModelsRequest(), timeout=5)).models
    assert [(model.name, model.max_model_len_tokens) for model in models] == [("reference", 32768)]


async def test_a_request_id_in_use_is_refused(cluster: Cluster) -> None:
    wanted = request(prompt(500, 9), 2000)
    wanted.request_id = "mine"
    stream = cluster.stream(wanted)
    await anext(stream)
    with pytest.raises(grpc.aio.AioRpcError, match="'mine' is in use"):
        await cluster.ask(wanted)
    await stream.aclose()  # type: ignore[attr-defined]
    await cluster.empty()


async def test_deadline_of_the_client_is_kept_and_frees_everything(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(request(prompt(100, 11), 30_000), timeout_s=0.5)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.empty()


async def test_cached_tokens_are_hits_also_where_one_worker_does_both() -> None:
    """O-54."""
    async with running(prefill=0, decode=1, own_flags={"decode-0": ("--role", "both")}) as alone:
        for cached in (0, 64):
            answer = await alone.ask(request(prompt(70), 8))
            assert answer.token_ids == expected_tokens(prompt(70), SamplingParams(temperature=0), 8)
            assert answer.last.usage.cached_tokens == cached
            assert answer.last.timeline.transferred_tokens == 0
