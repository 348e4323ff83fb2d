"""Every way to serve a request, on a cluster: taken when it is the only one that is open,
explained beforehand, and exact."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import grpc.aio
import pytest

from cluster.reference_cluster import Answer, Cluster, request, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import InvalidRequestError, OverloadedError
from twostroke.launch import cluster as commands
from twostroke.rpc.status import to_error
from twostroke.v1.cluster_pb2 import ExplainRequest, ExplainResponse, WatchResponse
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2 import GenerateRequest
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub

ONLY = {
    "p_then_d": (),
    "d_alone": ("--no-p-then-d", "--d-alone"),
    "p_alone": ("--no-p-then-d", "--p-alone"),
    "lent_decoder": ("--no-p-then-d", "--lent-decoder"),
}
WORKERS = {
    "p_then_d": ("prefill-0", "decode-0"),
    "d_alone": ("decode-0", "decode-0"),
    "p_alone": ("prefill-0", "prefill-0"),
    "lent_decoder": ("decode-0", "decode-0"),
}


def prompt(tokens: int, salt: int) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int, **sampling: float) -> list[int]:
    return expected_tokens(tokens, SamplingParams(**{"temperature": 0, **sampling}), count)  # type: ignore[arg-type]


def router(cluster: Cluster) -> str:
    return f"127.0.0.1:{cluster.ports['router']}"


async def explained(cluster: Cluster, tokens: list[int], max_tokens: int) -> ExplainResponse:
    asked = ExplainRequest(max_tokens=max_tokens)
    asked.tokens.token_ids.extend(tokens)
    return await commands.explain(router(cluster), asked, 5.0)


async def options(cluster: Cluster) -> list[str]:
    """How the requests of late were placed, the newest first."""
    return [each.option for each in await commands.requests(router(cluster), 100, 5.0)]


@pytest.mark.parametrize("way", ONLY)
async def test_the_only_way_that_is_open_is_explained_taken_and_exact(way: str) -> None:
    async with running(router_flags=ONLY[way]) as cluster:
        assert list((await cluster.view()).ways) == [way]
        for number, tokens in enumerate([prompt(7, 1), prompt(1000, 2)]):
            told = await explained(cluster, tokens, 20)
            assert told.option == way
            assert (told.prefill_worker_id, told.decode_worker_id) == WORKERS[way]
            assert (told.chunk_tokens > 0) is (way == "lent_decoder")
            assert f"* {way}" in told.text
            answer = await cluster.ask(request(tokens, 20))
            assert answer.token_ids == oracle(tokens, 20)
            timeline = answer.last.timeline
            assert (timeline.prefill_worker_id, timeline.decode_worker_id) == WORKERS[way]
            assert answer.last.usage.cached_tokens == 0
            assert await options(cluster) == [way] * (number + 1)
        seeded = GenerateRequest()
        seeded.CopyFrom(request(prompt(50, 3), 30))
        seeded.sampling.temperature, seeded.sampling.seed = 1.0, 7
        assert (await cluster.ask(seeded)).token_ids == oracle(prompt(50, 3), 30, temperature=1.0, seed=7)
        one = await cluster.ask(request(prompt(60, 4), 1))
        assert one.token_ids == oracle(prompt(60, 4), 1)
        await cluster.empty()


async def test_the_chunks_of_a_lent_decoder_are_as_small_as_the_slo_wants() -> None:
    """A step may take 90 % of 20 ms; of 1000 tokens at 100 us that is at most 180 at once."""
    flags = (*ONLY["lent_decoder"], "--slo", "default=60000/20")
    async with running(router_flags=flags, worker_flags=("--reference-token-us", "100")) as cluster:
        tokens = prompt(1000, 5)
        told = await explained(cluster, tokens, 2)
        assert 16 <= told.chunk_tokens <= 180
        before = steps(await cluster.view(), "decode-0")
        assert (await cluster.ask(request(tokens, 2))).token_ids == oracle(tokens, 2)
        view = await cluster.empty()
        assert steps(view, "decode-0") - before >= 1000 / 180


def steps(view: WatchResponse, name: str) -> int:
    return next(each.load.steps for each in view.workers if each.info.worker_id == name)


async def test_an_answer_goes_on_elsewhere_when_its_only_worker_dies() -> None:
    flags = ("--reference-step-ms", "10")
    async with running(prefill=0, decode=2, router_flags=ONLY["d_alone"], worker_flags=flags) as cluster:
        tokens, answer = prompt(200, 6), Answer()
        async for piece in cluster.stream(request(tokens, 60)):
            if len(answer.token_ids) < 10 <= len(answer.token_ids) + len(piece.token_ids):
                view = await cluster.view()
                cluster.kill(next(each.info.worker_id for each in view.workers if each.router_requests))
            answer.token_ids.extend(piece.token_ids)
            answer.pieces.append(piece)
        assert answer.token_ids == oracle(tokens, 60)
        assert answer.last.timeline.attempts == 2


@pytest.mark.parametrize(("gone", "way"), [("decode-0", "p_alone"), ("prefill-0", "d_alone")])
async def test_with_one_pool_gone_the_other_serves(gone: str, way: str) -> None:
    async with running(router_flags=("--placement", "all", "--no-lent-decoder")) as cluster:
        cluster.kill(gone)
        await cluster.until(lambda view: sum(bool(each.load.epoch) for each in view.workers) == 1)
        assert (await cluster.view()).ready
        tokens = prompt(300, 7)
        assert (await cluster.ask(request(tokens, 10))).token_ids == oracle(tokens, 10)
        assert await options(cluster) == [way]


async def test_requests_of_one_moment_go_to_different_workers() -> None:
    async with running(prefill=2, decode=2) as cluster:
        prompts = [prompt(400, 8), prompt(400, 9)]
        answers = await asyncio.gather(*(cluster.ask(request(each, 30)) for each in prompts))
        assert [answer.token_ids for answer in answers] == [oracle(each, 30) for each in prompts]
        assert {answer.last.timeline.prefill_worker_id for answer in answers} == {"prefill-0", "prefill-1"}
        assert {answer.last.timeline.decode_worker_id for answer in answers} == {"decode-0", "decode-1"}


async def test_a_conversation_comes_back_to_its_kv_and_another_tenant_does_not_find_it() -> None:
    async with running(prefill=3, decode=1) as cluster:
        turn = prompt(800, 10)
        first = await cluster.ask(request(turn, 16))
        reader = first.last.timeline.prefill_worker_id
        await cluster.until(lambda view: view.known_blocks >= 50)
        for number in range(3):
            turn = [*turn, *first.token_ids, *prompt(40, 11 + number)]
            first = await cluster.ask(request(turn, 16))
            assert first.token_ids == oracle(turn, 16)
            assert first.last.timeline.prefill_worker_id == reader
            assert first.last.usage.cached_tokens >= 800 - 16
        salted = request(turn, 4)
        salted.cache_salt = "somebody else"
        other = await cluster.ask(salted)
        assert other.token_ids == oracle(turn, 4)
        assert other.last.usage.cached_tokens == 0


async def test_what_no_way_serves_in_time_is_refused_with_a_time() -> None:
    """Half a millisecond a token: behind 8000 tokens a deadline of two seconds is hopeless, and soon it is not."""
    flags = ("--reference-token-us", "500")
    async with running(worker_flags=flags, router_flags=("--refuse",)) as cluster:
        await cluster.ask(request(prompt(200, 20), 30))
        long = asyncio.create_task(cluster.ask(request(prompt(8000, 21), 2)))
        await cluster.until(lambda view: any(each.load.pending_prompt_tokens > 6000 for each in view.workers))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(request(prompt(200, 22), 2), 2.0)
        error = to_error(caught.value)
        assert type(error) is OverloadedError
        assert error.retry_after_s is not None
        assert 1 <= error.retry_after_s < 20
        assert (await long).token_ids == oracle(prompt(8000, 21), 2)


async def test_a_class_is_chosen_by_header_and_one_that_there_is_not_is_named() -> None:
    async with running(router_flags=("--slo", "chat=500/50, batch=60000/1000")) as cluster:
        wanted, stub = request(prompt(40, 30), 3), InferenceServiceStub(cluster.channel)
        metadata = (("x-twostroke-slo", "chat"),)
        tokens = [
            token async for each in stub.Generate(wanted, timeout=20, metadata=metadata) for token in each.token_ids
        ]
        assert tokens == oracle(prompt(40, 30), 3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stub.Generate(wanted, timeout=20, metadata=(("x-twostroke-slo", "gold"),)):
                pass
        error = to_error(caught.value)
        assert type(error) is InvalidRequestError
        assert "'gold'; the classes of this router are batch, chat, default" in error.message
        assert "slo=chat" in cluster.log("router")
        command = ("explain", "--router", router(cluster), "--length", "300", "--slo", "chat", "--max-tokens", "5")
        told = await asyncio.to_thread(
            subprocess.run, [sys.executable, "-m", "twostroke", *command], capture_output=True, text=True, check=True
        )
        lines = told.stdout.splitlines()
        assert lines[0] == "p_then_d: prefill-0 reads, decode-0 writes"
        assert lines[1].startswith("* p_then_d     prefill-0 -> decode-0    cost ")
        with pytest.raises(InvalidRequestError, match="'gold'"):
            await commands.explain(router(cluster), ExplainRequest(prompt_tokens=5, slo="gold"), 5.0)
        with pytest.raises(InvalidRequestError, match="tokenizer"):
            await commands.explain(router(cluster), ExplainRequest(text="hello"), 5.0)
