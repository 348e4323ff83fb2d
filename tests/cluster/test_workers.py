"""Workers that come, go, differ or die, seen through the router."""

import asyncio
import signal

import grpc
import grpc.aio
import pytest

from cluster.reference_cluster import Cluster, request, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import NoWorkerError
from twostroke.rpc.status import to_error
from twostroke.v1.cluster_pb2 import WORKER_STATE_READY, WORKER_STATE_REFUSED, WORKER_STATE_UNREACHABLE
from twostroke.v1.engine_pb2 import SamplingParams

PROMPT = list(range(100, 400))


def oracle(count: int) -> list[int]:
    return expected_tokens(PROMPT, SamplingParams(temperature=0), count)


async def test_a_router_without_workers_says_what_it_waits_for() -> None:
    async with running(prefill=1, decode=0, wait=False) as cluster:
        view = await cluster.until(lambda view: any(w.state == WORKER_STATE_READY for w in view.workers))
        assert not view.ready
        assert view.waiting_for.startswith("a decode worker")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(request(PROMPT))
        error = to_error(caught.value)
        assert type(error) is NoWorkerError
        assert "waits for a decode worker" in error.message
        assert error.retry_after_s == 1.0


async def test_layouts_that_differ_are_refused_with_both_values_named() -> None:
    own = {"decode-1": ("--block-size-tokens", "32")}
    async with running(prefill=1, decode=2, own_flags=own) as cluster:
        view = await cluster.view()
        pair = view.refused_pairs[0]
        assert (pair.prefill_worker_id, pair.decode_worker_id) == ("prefill-0", "decode-1")
        assert pair.reason == "block_size_tokens is 16 on prefill and 32 on decode"
        answers = await asyncio.gather(*(cluster.ask(request(PROMPT, 4)) for _ in range(8)))
        assert {answer.last.timeline.decode_worker_id for answer in answers} == {"decode-0"}
        assert all(answer.token_ids == oracle(4) for answer in answers)


async def test_a_cluster_of_strangers_is_not_ready_and_says_why() -> None:
    own = {"decode-0": ("--block-size-tokens", "32")}
    async with running(own_flags=own, wait=False) as cluster:
        view = await cluster.until(lambda view: sum(w.state == WORKER_STATE_READY for w in view.workers) == 2)
        assert not view.ready
        assert "block_size_tokens is 16 on prefill and 32 on decode" in view.waiting_for


async def test_a_worker_that_restarts_has_a_new_epoch_and_serves_again() -> None:
    async with running() as cluster:
        before = {w.info.worker_id: w.info.epoch for w in (await cluster.view()).workers}
        cluster.kill("decode-0")
        await cluster.until(lambda view: any(w.state == WORKER_STATE_UNREACHABLE for w in view.workers))
        cluster.start_worker("decode-0")
        after = {w.info.worker_id: w.info.epoch for w in (await cluster.ready(2)).workers}
        assert after["prefill-0"] == before["prefill-0"]
        assert after["decode-0"] != before["decode-0"]
        assert (await cluster.ask(request(PROMPT, 5))).token_ids == oracle(5)


@pytest.mark.parametrize("victim", ["decode", "prefill"])
async def test_a_killed_worker_costs_no_token(victim: str) -> None:
    """The stream goes on elsewhere from the tokens that the client has."""
    async with running(prefill=2, decode=2, worker_flags=("--reference-step-ms", "5")) as cluster:
        await _killed_in_mid_stream(cluster, victim)


async def _killed_in_mid_stream(cluster: Cluster, victim: str) -> None:
    tokens: list[int] = []
    last = None
    async for piece in cluster.stream(request(PROMPT, 120)):
        tokens.extend(piece.token_ids)
        last = piece
        if len(tokens) == 30:
            view = await cluster.view()
            busy = [w.info.worker_id for w in view.workers if w.router_requests or victim == "prefill"]
            cluster.kill(next(name for name in busy if name.startswith(victim)))
    assert tokens == oracle(120)
    assert last is not None
    assert last.usage.completion_tokens == 120
    assert last.timeline.attempts == (2 if victim == "decode" else 1)


async def test_a_prefill_worker_killed_while_it_computes_is_replaced() -> None:
    flags = ("--reference-token-us", "1000")
    async with running(prefill=2, decode=1, worker_flags=flags) as cluster:
        asked = asyncio.create_task(cluster.ask(request(PROMPT * 4, 8)))
        view = await cluster.until(lambda view: any(w.load.running_requests for w in view.workers))
        cluster.kill(next(w.info.worker_id for w in view.workers if w.load.running_requests))
        answer = await asked
        assert answer.token_ids == expected_tokens(PROMPT * 4, SamplingParams(temperature=0), 8)
        assert answer.last.timeline.attempts == 2


async def test_without_another_decode_worker_the_client_is_told() -> None:
    async with running(worker_flags=("--reference-step-ms", "5")) as cluster:
        stream = cluster.stream(request(PROMPT, 1000))
        await anext(stream)
        await anext(stream)
        cluster.kill("decode-0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("name", ["prefill-0", "decode-0", "router"])
async def test_sigterm_ends_every_process_cleanly(name: str) -> None:
    async with running() as cluster:
        assert (await cluster.ask(request(PROMPT, 2))).token_ids == oracle(2)
        cluster.signal(name, signal.SIGTERM)
        assert await asyncio.to_thread(cluster.wait_exit, name) == 0
        assert "Traceback" not in cluster.log(name), cluster.log(name)


async def test_a_worker_with_a_shorter_model_is_refused_by_name() -> None:
    own = {"decode-0": ("--max-model-len-tokens", "1024")}
    async with running(own_flags=own, router_flags=("--max-model-len-tokens", "4096"), wait=False) as cluster:
        view = await cluster.until(lambda view: any(w.state == WORKER_STATE_REFUSED for w in view.workers))
        detail = next(w.detail for w in view.workers if w.state == WORKER_STATE_REFUSED)
        assert "4096" in detail
        assert "1024" in detail
        assert "--max-model-len-tokens" in detail
