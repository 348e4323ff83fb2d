"""KV that goes wrong on its way: never text, held against the pair alone, and forgiven when the pair works again."""

from __future__ import annotations

import asyncio
import json

import grpc
import grpc.aio
import pytest

from cluster.reference_cluster import Cluster, request, running
from twostroke.config import RpcSettings
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import KvCorruptError, NoWorkerError
from twostroke.rpc.channel import connect
from twostroke.rpc.status import to_error
from twostroke.v1.cluster_pb2 import LINK_STATE_QUARANTINED, LINK_STATE_READY, LinkView, WatchResponse
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.worker_pb2 import DropPeerRequest, ProbeLinkRequest
from twostroke.v1.worker_pb2_grpc import WorkerServiceStub

SLOW = ("--reference-token-us", "200", "--step-budget-tokens", "64")


def prompt(tokens: int, salt: int) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def faults(**plan: object) -> tuple[str, str]:
    return "--reference-faults", json.dumps([plan])


def link(view: WatchResponse, source: str, reader: str) -> LinkView:
    return next(each for each in view.links if (each.prefill_worker_id, each.decode_worker_id) == (source, reader))


async def ask_many(cluster: Cluster, count: int, salt: int = 0) -> set[tuple[str, str]]:
    """Asks at once, expects right answers. Returns the pairs that served."""
    prompts = [prompt(200, salt + index) for index in range(count)]
    answers = await asyncio.gather(*(cluster.ask(request(tokens, 5)) for tokens in prompts))
    assert [answer.token_ids for answer in answers] == [oracle(tokens, 5) for tokens in prompts]
    timelines = [answer.last.timeline for answer in answers]
    return {(each.prefill_worker_id, each.decode_worker_id) for each in timelines}


async def test_every_link_is_measured_and_its_lanes_are_logged_once() -> None:
    """O-83, O-99: which way KV takes is seen, and that it takes it."""
    async with running(prefill=2, decode=2) as cluster:
        await ask_many(cluster, 12)
        view = await cluster.empty()
        assert len(view.links) == 4
        for each in view.links:
            assert (each.state, list(each.lanes), each.rdma, each.failures) == (
                LINK_STATE_READY,
                ["shm/mmap"],
                False,
                0,
            )
            assert each.bytes_per_s > 1e6
            name = f"link {each.prefill_worker_id} -> {each.decode_worker_id} uses shm/mmap (no RDMA)"
            assert cluster.log("router").count(name) == 1
        view = await cluster.until(lambda view: sum(each.load.kv_received_handoffs for each in view.workers) == 12)
        assert view.handoffs.released == 12


async def test_workers_at_ipv6_addresses_exchange_kv() -> None:
    """O-81."""
    async with running(worker_host="::1") as cluster:
        assert await ask_many(cluster, 2) == {("prefill-0", "decode-0")}
        view = await cluster.empty()
        assert {each.address.rpartition(":")[0] for each in view.workers} == {"[::1]"}
        # Loads are reported a moment after the answers.
        await cluster.until(lambda view: sum(each.load.kv_received_handoffs for each in view.workers) == 2)


async def test_a_link_that_does_not_work_keeps_the_router_from_being_ready_and_says_why() -> None:
    """O-38: 503 at once instead of requests that hang."""
    own = {"decode-0": faults(fault="cut", worker="prefill-0")}
    async with running(own_flags=own, wait=False) as cluster:
        view = await cluster.until(lambda view: any(each.state == LINK_STATE_QUARANTINED for each in view.links))
        reason = "the link prefill-0 -> decode-0, which failed: the fault plan cuts the link from prefill-0"
        assert not view.ready
        assert view.waiting_for == reason
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.ask(request([1, 2, 3]))
        error = to_error(caught.value)
        assert type(error) is NoWorkerError
        assert reason in error.message


async def test_a_pair_that_fails_is_set_aside_and_its_workers_are_not() -> None:
    """The first probe succeeds, transfers do not: three requests find out, none notices."""
    own = {"decode-0": faults(fault="cut", worker="prefill-0", at_read=2)}
    async with running(prefill=2, decode=2, worker_flags=SLOW, own_flags=own) as cluster:
        for salt in range(0, 100, 10):
            await ask_many(cluster, 8, salt)
            view = await cluster.view()
            if link(view, "prefill-0", "decode-0").state == LINK_STATE_QUARANTINED:
                break
        bad = link(view, "prefill-0", "decode-0")
        assert bad.state == LINK_STATE_QUARANTINED
        assert "cuts the link from prefill-0" in bad.detail
        assert bad.failures >= 3
        pairs = await ask_many(cluster, 24, 1000)
        assert ("prefill-0", "decode-0") not in pairs
        assert {source for source, _ in pairs} == {"prefill-0", "prefill-1"}
        assert {reader for _, reader in pairs} == {"decode-0", "decode-1"}
        view = await cluster.empty()
        assert [each.failures for each in view.links if each.state == LINK_STATE_READY] == [0, 0, 0]


async def test_a_pair_that_works_again_is_used_again() -> None:
    """O-80: with nothing else to use, requests wait for the next probe; fifty after it go through."""
    own = {"decode-0": faults(fault="cut", worker="prefill-0", at_read=2, count=4)}
    async with running(worker_flags=SLOW, own_flags=own) as cluster:
        tokens = prompt(200, 1)
        assert (await cluster.ask(request(tokens, 5))).token_ids == oracle(tokens, 5)
        view = await cluster.until(lambda view: link(view, "prefill-0", "decode-0").state == LINK_STATE_READY)
        failures = link(view, "prefill-0", "decode-0").failures
        assert failures >= 3
        assert await ask_many(cluster, 50, 10) == {("prefill-0", "decode-0")}
        assert link(await cluster.empty(), "prefill-0", "decode-0").failures == failures


@pytest.mark.parametrize("length", [30, 1000], ids=["one chunk", "many chunks"])
async def test_corrupt_kv_never_becomes_text(length: int) -> None:
    """O-02, O-15: found in whatever block, the prompt is placed again, and the pair is under suspicion."""
    plan = [{"fault": "corrupt", "at_request": 1, "count": 2, "block": length // 32, "byte": 5}]
    own = {"prefill-0": ("--reference-faults", json.dumps(plan))}
    async with running(prefill=1, decode=2, worker_flags=SLOW, own_flags=own) as cluster:
        answer = await cluster.ask(request(prompt(length, 1), 12))
        assert answer.token_ids == oracle(prompt(length, 1), 12)
        assert answer.last.timeline.attempts == 3
        view = await cluster.empty()
        assert sum(each.failures for each in view.links) >= 4, "each decode worker tried each of the two"
        assert "is corrupt at layer" in cluster.log("router")
        assert view.recomputed_prompts == 0


async def test_kv_that_is_always_corrupt_ends_in_an_error_after_the_first_token() -> None:
    own = {"prefill-0": faults(fault="corrupt", at_request=1, count=100)}
    async with running(worker_flags=SLOW, own_flags=own) as cluster:
        tokens: list[int] = []

        async def read() -> None:
            async for piece in cluster.stream(request(prompt(300, 1), 12)):
                tokens.extend(piece.token_ids)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert isinstance(to_error(caught.value), (KvCorruptError, NoWorkerError))
        assert tokens == oracle(prompt(300, 1), 1)
        await cluster.empty()


async def test_a_worker_probes_and_forgets_on_request_only_within_a_deadline() -> None:
    async with running(prefill=1, decode=1) as cluster:
        info = {each.info.worker_id: each.info for each in (await cluster.view()).workers}
        channel = connect(f"127.0.0.1:{cluster.ports['decode-0']}", RpcSettings())
        stub = WorkerServiceStub(channel)
        source = info["prefill-0"]
        probe = ProbeLinkRequest(source_worker_id="prefill-0", source_epoch=source.epoch, endpoint=source.kv_endpoint)
        try:
            assert list((await stub.ProbeLink(probe, timeout=5)).lanes) == ["shm/mmap"]
            await stub.DropPeer(DropPeerRequest(worker_id="prefill-0", epoch="long ago"), timeout=5)
            for call in (
                stub.ProbeLink(probe),
                stub.DropPeer(DropPeerRequest(worker_id="prefill-0", epoch="long ago")),
                stub.DropPeer(DropPeerRequest(worker_id="decode-0", epoch=info["decode-0"].epoch), timeout=5),
            ):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            probe.source_epoch = "another"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.ProbeLink(probe, timeout=5)
            assert isinstance(to_error(caught.value), KvCorruptError)
        finally:
            await channel.close()
        assert await ask_many(cluster, 2) == {("prefill-0", "decode-0")}
