"""What a worker tells routers over gRPC: what it is, its load and steps, its blocks; and that it keeps to chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest

from twostroke.config import RpcSettings, WorkerSettings
from twostroke.engine.reference import ReferenceEngine
from twostroke.policy.block_hash import ALGORITHM, KvIdentity, block_hashes
from twostroke.policy.kv_events import Stored
from twostroke.policy.prefix_index import key
from twostroke.rpc.channel import connect
from twostroke.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from twostroke.worker.assembly import Worker
from twostroke.worker.kv_feed import KEPT_BATCHES

WAIT_S = 20
PROMPT = list(range(1000, 1100))


@pytest.fixture
async def worker(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Worker, grpc.aio.Channel]]:
    """A worker with 64 tokens a step, which takes 2 ms or the parameter, and a channel to it."""
    settings = WorkerSettings(
        engine="reference",
        port=0,
        step_budget_tokens=64,
        reference_blocks=32,
        reference_step_ms=getattr(request, "param", 2),
        reference_token_us=10,
        drain_s=0,
    )
    engine = ReferenceEngine(settings, epoch="e", worker_id="w", folder=tmp_path)
    made = Worker(settings, engine, await engine.start(), "w", "e")
    stepping = asyncio.create_task(made.host.run())
    port = await made.listen()
    async with connect(f"127.0.0.1:{port}", RpcSettings()) as channel, asyncio.timeout(WAIT_S):
        yield made, channel
    stepping.cancel()
    await asyncio.gather(stepping, return_exceptions=True)
    await made._server.drain(0)
    await engine.close()


def message(name: str, prompt: list[int], max_tokens: int = 1, **more: str) -> EngineRequest:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling, **more)


async def read(channel: grpc.aio.Channel, wanted: EngineRequest, chunk_tokens: int = 0) -> None:
    """Has the prompt computed, and its KV freed."""
    stub = prefill_pb2_grpc.PrefillServiceStub(channel)
    call = stub.Prefill(
        prefill_pb2.PrefillRequest(request=wanted, worker_epoch="e", chunk_tokens=chunk_tokens), timeout=WAIT_S
    )
    assert [event.WhichOneof("event") async for event in call][-1] == "finished"
    await stub.Release(prefill_pb2.ReleaseRequest(request_ids=[wanted.request_id]), timeout=WAIT_S)


async def test_a_worker_says_how_it_names_blocks_and_what_steps_should_take(worker) -> None:
    stub = worker_pb2_grpc.WorkerServiceStub(worker[1])
    info = await stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=WAIT_S)
    hashing = info.block_hashing
    assert (hashing.algorithm, len(hashing.root), hashing.block_size_tokens) == (ALGORITHM, 32, 16)
    assert (info.prior_costs.const_s, info.prior_costs.per_prefill_token_s) == pytest.approx((2e-3, 1e-5))


async def test_every_listener_hears_of_every_step_once(worker) -> None:
    stub = worker_pb2_grpc.WorkerServiceStub(worker[1])
    first, second = (stub.WatchLoad(worker_pb2.WatchLoadRequest(interval_ms=100)) for _ in range(2))
    assert not (await first.read()).step_samples
    await read(worker[1], message("a", PROMPT))
    for stream in (first, second):
        samples: list[worker_pb2.StepSample] = []
        steps = 0
        while steps < 2:
            report = await stream.read()
            steps = report.steps
            samples += report.step_samples
        assert [(each.prefill_tokens, each.prefill_chunks) for each in samples] == [(64, 1), (36, 1)]
        assert [each.prefill_pairs for each in samples] == [64 * 32, 36 * (64 + 18)]
        assert all(each.duration_ms >= 2 for each in samples)
        assert not (await stream.read()).step_samples
        stream.cancel()


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_prompt_is_computed_in_no_larger_chunks_than_asked_for(worker, side: str) -> None:
    channel = worker[1]
    if side == "prefill":
        await read(channel, message("a", PROMPT), chunk_tokens=40)
    else:
        session = decode_pb2_grpc.DecodeServiceStub(channel).Session()
        opened = decode_pb2.SessionOpen(router_id="r", worker_epoch="e")
        await session.write(decode_pb2.SessionRequest(open=opened))
        admit = decode_pb2.Admit(slot=1, request=message("a", PROMPT), chunk_tokens=40)
        await session.write(decode_pb2.SessionRequest(admit=admit))
        while not (await session.read()).step.finishes:
            pass
        session.cancel()
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    report = await stub.WatchLoad(worker_pb2.WatchLoadRequest()).read()
    assert [each.prefill_tokens for each in report.step_samples] == [40, 40, 20]


@pytest.mark.parametrize("worker", [500], indirect=True)
async def test_pending_prompts_are_counted_with_their_tokens(worker) -> None:
    """Both are pending for two steps, which is long enough for reports that a busy machine delays."""
    channel = worker[1]
    reading = [asyncio.create_task(read(channel, message(name, PROMPT))) for name in "ab"]
    watch = worker_pb2_grpc.WorkerServiceStub(channel).WatchLoad(worker_pb2.WatchLoadRequest(), timeout=WAIT_S)
    async for report in watch:
        assert (report.pending_prompts == 0) == (report.pending_prompt_tokens == 0)
        assert report.pending_prompt_tokens <= 100 * report.pending_prompts
        if report.pending_prompts == 2:
            break
    await asyncio.gather(*reading)


async def test_listeners_get_a_snapshot_and_then_every_change(worker) -> None:
    channel = worker[1]
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    early = stub.WatchKvEvents(worker_pb2.WatchKvEventsRequest())
    empty = await early.read()
    assert (empty.epoch, empty.sequence, empty.snapshot, list(empty.changes)) == ("e", 0, True, [])
    await read(channel, message("a", PROMPT))
    blocks = [key(each) for each in block_hashes(PROMPT, 16)]
    stored: list[int] = []
    sequence = 0
    while len(stored) < 6:
        told = await early.read()
        assert (told.sequence, told.snapshot) == (sequence + 1, False)
        sequence = told.sequence
        for change in told.changes:
            assert change.stored.HasField("parent_hash") == bool(stored)
            assert not stored or change.stored.parent_hash == stored[-1]
            stored += change.stored.block_hashes
    assert stored == blocks
    late = stub.WatchKvEvents(worker_pb2.WatchKvEventsRequest())
    snapshot = await late.read()
    assert (snapshot.sequence, snapshot.snapshot) == (sequence, True)
    assert [list(change.stored.block_hashes) for change in snapshot.changes] == [blocks]
    await read(channel, message("b", PROMPT, cache_salt="s"))
    salted = [key(each) for each in block_hashes(PROMPT, 16, KvIdentity(salt="s"))]
    for stream in (early, late):
        heard: list[int] = []
        while len(heard) < 6:
            heard += [each for change in (await stream.read()).changes for each in change.stored.block_hashes]
        assert heard == salted
        stream.cancel()


async def test_a_listener_that_is_far_behind_gets_a_snapshot_again(worker) -> None:
    feed = worker[0].host.kv
    stream = feed.watch()
    assert (await anext(stream)).snapshot
    for number in range(KEPT_BATCHES + 5):
        feed.took([Stored([number + 1], None)])
        feed._flush()
    behind = await anext(stream)
    assert (behind.snapshot, behind.sequence, len(behind.changes)) == (True, KEPT_BATCHES + 5, KEPT_BATCHES + 5)
    feed.took([Stored([9999], None)])
    feed._flush()
    after = await anext(stream)
    assert (after.snapshot, after.sequence, after.changes) == (False, KEPT_BATCHES + 6, [Stored([9999], None)])
