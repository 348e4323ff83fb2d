"""What vLLM workers tell routers, and how they share their steps, on the real engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc.aio
import pytest

from engine.conftest import TwoPools, watch
from twostroke.config import RpcSettings
from twostroke.policy.block_hash import ALGORITHM, DEFAULT_ROOT, KvIdentity, block_hashes
from twostroke.policy.prefix_index import key
from twostroke.policy.prior import CPU_CORE
from twostroke.policy.step_model import LinearStepModel, StepBatch
from twostroke.rpc.channel import connect
from twostroke.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2, worker_pb2_grpc
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

WAIT_S = 120


def prompt_of(tokens: int, seed: int) -> list[int]:
    return [(index * 67 + seed * 1009) % 30000 + 200 for index in range(tokens)]


class Worker:
    """The prefill worker, without a router."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.stub = worker_pb2_grpc.WorkerServiceStub(channel)
        self._prefill = prefill_pb2_grpc.PrefillServiceStub(channel)

    async def info(self) -> worker_pb2.GetInfoResponse:
        return await self.stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=WAIT_S)

    async def read(self, name: str, prompt: Sequence[int], *, chunk_tokens: int = 0, salt: str | None = None) -> None:
        """Has a prompt computed, and frees its KV."""
        request = EngineRequest(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0, max_tokens=4),
            cache_salt=salt,
        )
        epoch = (await self.info()).epoch
        asked = prefill_pb2.PrefillRequest(request=request, worker_epoch=epoch, chunk_tokens=chunk_tokens)
        async for _ in self._prefill.Prefill(asked, timeout=WAIT_S):
            pass
        await self._prefill.Release(prefill_pb2.ReleaseRequest(request_ids=[name]), timeout=WAIT_S)


@pytest.fixture
async def worker(two_pools: TwoPools) -> AsyncIterator[Worker]:
    view = await watch(two_pools.grpc, lambda view: view.ready)
    address = next(each.address for each in view.workers if each.info.worker_id == "prefill-0")
    async with connect(address, RpcSettings()) as channel:
        yield Worker(channel)


async def test_its_blocks_have_the_names_that_a_router_computes(worker: Worker) -> None:
    hashing = (await worker.info()).block_hashing
    assert (hashing.algorithm, hashing.root) == (ALGORITHM, DEFAULT_ROOT)
    size = hashing.block_size_tokens
    prompt = prompt_of(3 * size + 20, seed=1)
    stream = worker.stub.WatchKvEvents(worker_pb2.WatchKvEventsRequest(), timeout=WAIT_S)
    first = await stream.read()
    assert first.snapshot
    await worker.read("kv-a", prompt)
    await worker.read("kv-b", prompt, salt="tenant")
    expected = [
        key(each)
        for identity in (KvIdentity(), KvIdentity(salt="tenant"))
        for each in block_hashes(prompt, size, identity, hashing.root)
    ]
    assert len(expected) == 6
    heard: list[int] = []
    sequence = first.sequence
    while len(heard) < len(expected):
        told = await stream.read()
        assert told.sequence == sequence + 1
        sequence = told.sequence
        heard += [each for change in told.changes for each in change.stored.block_hashes]
    assert heard == expected
    again = await worker.stub.WatchKvEvents(worker_pb2.WatchKvEventsRequest(), timeout=WAIT_S).read()
    assert again.snapshot
    assert set(expected) <= {each for change in again.changes for each in change.stored.block_hashes}


async def test_it_tells_whose_cores_it_uses(two_pools: TwoPools) -> None:
    view = await watch(two_pools.grpc, lambda view: view.ready)
    prefill, decode = (each.info.cores for each in sorted(view.workers, key=lambda each: each.info.worker_id)[::-1])
    assert prefill.machine
    assert prefill.machine == decode.machine
    assert (prefill.own, prefill.spare) == (decode.spare, decode.own)
    assert set(prefill.own).isdisjoint(decode.own)


async def test_its_steps_are_about_what_it_expected_them_to_be(worker: Worker) -> None:
    costs = (await worker.info()).prior_costs
    prior = LinearStepModel(*(getattr(costs, field.name) for field in costs.DESCRIPTOR.fields))
    # SmolLM2-135M: 106.2 million parameters in its layers and 28.3 million of embeddings, in float32 on one core.
    assert costs.per_prefill_token_s == pytest.approx(2 * 106.2e6 / CPU_CORE.flops_per_s, rel=0.01)
    assert costs.const_s == pytest.approx(CPU_CORE.step_s + 4 * 134.5e6 / CPU_CORE.bytes_per_s, rel=0.01)
    stream = worker.stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=WAIT_S)
    await stream.read()
    await worker.read("steps", prompt_of(700, seed=2))
    samples: list[worker_pb2.StepSample] = []
    while sum(each.prefill_tokens for each in samples) < 700:
        samples += (await stream.read()).step_samples
    assert [each.prefill_tokens for each in samples if each.prefill_tokens] == [512, 188]
    for each in samples:
        batch = StepBatch(
            each.sequences, each.context_tokens, each.prefill_tokens, each.prefill_pairs, each.prefill_chunks
        )
        assert 0.1 < each.duration_ms / 1000 / prior.step_s(batch) < 10


async def test_a_prompt_is_computed_in_no_larger_chunks_than_asked_for(worker: Worker) -> None:
    stream = worker.stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=WAIT_S)
    before = (await stream.read()).steps
    await worker.read("chunks", prompt_of(200, seed=3), chunk_tokens=64)
    samples: list[worker_pb2.StepSample] = []
    while sum(each.prefill_tokens for each in samples) < 200:
        report = await stream.read()
        samples += report.step_samples
    assert [each.prefill_tokens for each in samples] == [64, 64, 64, 8]
    assert report.steps >= before + 4


async def test_a_short_prompt_does_not_wait_for_a_long_one(worker: Worker) -> None:
    stream = worker.stub.WatchLoad(worker_pb2.WatchLoadRequest(), timeout=WAIT_S)
    long = asyncio.create_task(worker.read("long", prompt_of(1900, seed=4)))
    pending = 0
    while not 0 < pending < 1900:
        report = await stream.read()
        pending = report.pending_prompt_tokens
    assert report.pending_prompts == 1
    await worker.read("short", prompt_of(32, seed=5))
    assert not long.done()
    await long
