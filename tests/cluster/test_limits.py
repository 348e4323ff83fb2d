"""What clients do to a router, and what it costs: open files, idle connections, slow readers, cancelled streams, and
deadlines that end in the middle."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from cluster.reference_cluster import Cluster, request, running
from twostroke.bench.limits import cancel_streams, idle_connections
from twostroke.config import RpcSettings
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import DeadlineError, PromptTooLongError
from twostroke.rpc.channel import connect
from twostroke.rpc.status import to_error
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A prompt token takes half a millisecond, a step reads 64 of them.
SLOW = ("--reference-token-us", "500", "--step-budget-tokens", "64")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with running() as cluster:
        yield cluster


def prompt(tokens: int, salt: int) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def router(cluster: Cluster) -> psutil.Process:
    return psutil.Process(cluster._processes["router"].pid)


async def files_back(cluster: Cluster, before: int) -> None:
    async with asyncio.timeout(15):
        while router(cluster).num_fds() > before + 5:  # noqa: ASYNC110 another process closes them
            await asyncio.sleep(0.05)


async def test_memory_does_not_grow_with_cancelled_streams(cluster: Cluster) -> None:
    """O-68: `python -m twostroke.bench.limits` does a hundred thousand. Here what a thousand more cost, after those
    that the router remembers."""
    stub = InferenceServiceStub(cluster.channel)
    await cancel_streams(stub, 1500, 16)
    before_bytes = router(cluster).memory_info().rss
    await cancel_streams(stub, 1000, 16, first=1500)
    assert router(cluster).memory_info().rss - before_bytes < 6 << 20, "a leak of a stream's state is 10 KiB and more"
    await cluster.empty()


async def test_idle_connections_cost_little_and_delay_nobody(cluster: Cluster) -> None:
    """Design: ten thousand, which the benchmark opens; three hundred here."""
    before_bytes, before_files = router(cluster).memory_info().rss, router(cluster).num_fds()
    async with idle_connections("127.0.0.1", cluster.ports["router"], 300) as opened:
        assert router(cluster).num_fds() >= before_files + 300
        began_s = time.monotonic()
        assert (await cluster.ask(request(prompt(20, 1), 8))).token_ids == oracle(prompt(20, 1), 8)
        assert time.monotonic() - began_s < 1
        assert all(connection.is_open for connection in opened)
        assert router(cluster).memory_info().rss - before_bytes < 300 * (64 << 10)
    await files_back(cluster, before_files)


async def test_a_router_without_files_keeps_what_it_has_and_recovers(cluster: Cluster) -> None:
    """O-65: 1,000 connections where there are 200 files."""
    before = router(cluster).num_fds()
    limits = router(cluster).rlimit(resource.RLIMIT_NOFILE)
    router(cluster).rlimit(resource.RLIMIT_NOFILE, (before + 100, limits[1]))
    writers: list[asyncio.StreamWriter] = []
    try:
        async with aclosing(cluster.stream(request(prompt(20, 2), 2000))) as stream:
            tokens = list((await anext(stream)).token_ids)
            for _ in range(1000):
                # The kernel takes them; the router cannot.
                connecting = asyncio.open_connection("127.0.0.1", cluster.ports["router"])
                try:
                    writers.append((await asyncio.wait_for(connecting, 0.5))[1])
                except (TimeoutError, OSError):
                    break
            assert len(writers) > 100
            assert router(cluster).num_fds() <= before + 100
            async for piece in stream:
                tokens.extend(piece.token_ids)
            assert tokens == oracle(prompt(20, 2), 2000)
    finally:
        for writer in writers:
            writer.close()
    await files_back(cluster, before)
    async with connect(f"127.0.0.1:{cluster.ports['router']}", RpcSettings()) as channel:
        call = InferenceServiceStub(channel).Generate(request(prompt(20, 3), 2), timeout=20, wait_for_ready=True)
        answered = [token async for piece in call for token in piece.token_ids]
    assert answered == oracle(prompt(20, 3), 2)
    router(cluster).rlimit(resource.RLIMIT_NOFILE, limits)


async def test_readers_that_are_slow_cost_no_memory_and_no_time_of_others(cluster: Cluster) -> None:
    """O-64 over gRPC: twenty that read one message and then nothing; what waits for them is bounded by their
    answers."""
    before_bytes = router(cluster).memory_info().rss
    stub = InferenceServiceStub(cluster.channel)
    calls = [stub.Generate(request(prompt(20, 10 + i), 2000), timeout=20) for i in range(20)]
    await asyncio.gather(*(call.read() for call in calls))
    assert (await cluster.ask(request(prompt(20, 9), 20))).token_ids == oracle(prompt(20, 9), 20)
    view = await cluster.until(lambda view: all(not w.load.running_requests for w in view.workers))
    assert router(cluster).memory_info().rss - before_bytes < 60 << 20
    assert sum(worker.load.used_blocks for worker in view.workers) == 0, "workers do not wait for them"
    for call in calls:
        call.cancel()
    await cluster.empty()


async def test_prompts_of_every_size_are_served_or_refused_by_name(cluster: Cluster) -> None:
    """O-72: one token, one that fills the model, one more, and a million of them."""
    longest = (await cluster.view()).workers[0].info.max_model_len_tokens
    for tokens in (1, longest - 1):
        answer = await cluster.ask(request(prompt(tokens, 4), 5))
        assert answer.token_ids == oracle(prompt(tokens, 4), min(5, longest - tokens))
    for tokens in (longest, 1_000_000):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(request([5] * tokens, 5))
        assert isinstance(to_error(caught.value), PromptTooLongError)


async def test_work_stops_on_both_workers_when_the_clients_deadline_is_over() -> None:
    """O-73: in the middle of a prompt of 1.5 s, and of an answer of many more."""
    async with running(worker_flags=SLOW) as slow:
        for tokens, timeout_s, where in ((3000, 0.5, "prefill-0"), (20, 1.0, "decode-0")):
            asked = asyncio.create_task(slow.ask(request(prompt(tokens, 5), 5000), timeout_s))
            await slow.until(
                lambda view, where=where: any(
                    w.load.running_requests for w in view.workers if w.info.worker_id == where
                )
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asked
            assert isinstance(to_error(caught.value), DeadlineError)
            ended_s = time.monotonic()
            await slow.empty()
            assert time.monotonic() - ended_s < 0.7, "it would compute for a second or more"
