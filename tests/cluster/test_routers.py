"""Several routers over the same workers: none over-commits one, and what a dead one had is freed, in every phase."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from cluster.reference_cluster import Answer, Cluster, free_ports, request, running
from twostroke.config import RpcSettings
from twostroke.engine.reference_model import expected_tokens
from twostroke.rpc.channel import connect
from twostroke.v1.cluster_pb2 import WatchResponse
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2 import GenerateRequest
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub
from twostroke.v1.worker_pb2 import WatchLoadResponse

# A prompt token takes half a millisecond, a step reads 64 of them.
WORKERS = ("--reference-token-us", "500", "--step-budget-tokens", "64")


class Second:
    """Another router in front of the same workers."""

    def __init__(self, cluster: Cluster, port: int) -> None:
        self.cluster = cluster
        self.channel = connect(f"127.0.0.1:{port}", RpcSettings())
        self.asked: list[asyncio.Task[Answer]] = []

    async def ask(self, wanted: GenerateRequest) -> Answer:
        answer = Answer()
        async for piece in InferenceServiceStub(self.channel).Generate(wanted, timeout=20, wait_for_ready=True):
            answer.token_ids.extend(piece.token_ids)
            answer.pieces.append(piece)
        return answer

    def begin(self, wanted: GenerateRequest) -> None:
        self.asked.append(asyncio.create_task(self.ask(wanted)))

    async def die(self) -> None:
        self.cluster.kill("router-2")
        await asyncio.gather(*self.asked, return_exceptions=True)


@asynccontextmanager
async def two_routers(
    worker_flags: Sequence[str] = WORKERS, own_flags: dict[str, Sequence[str]] | None = None
) -> AsyncIterator[tuple[Cluster, Second]]:
    async with running(worker_flags=worker_flags, own_flags=own_flags) as cluster:
        port = free_ports(1)[0]
        workers = ",".join(f"127.0.0.1:{cluster.ports[name]}" for name in ("prefill-0", "decode-0"))
        flags = ("--front-end", "plain", "--grpc-port", str(port), "--workers", workers)
        cluster.start("router-2", *flags)
        second = Second(cluster, port)
        try:
            # Its links are probed when it answers.
            async with asyncio.timeout(20):
                while True:
                    try:
                        await second.ask(request(prompt(20, 0), 2))
                        break
                    except Exception:
                        await asyncio.sleep(0.05)
            # A report of its 20 tokens may be on its way when the first router still sees an empty worker.
            await cluster.until(lambda view: load(view, "prefill-0").computed_prompt_tokens >= 20)
            await cluster.empty()
            yield cluster, second
        finally:
            for each in second.asked:
                each.cancel()
            await asyncio.gather(*second.asked, return_exceptions=True)
            await second.channel.close()


def prompt(tokens: int, salt: int) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def load(view: WatchResponse, name: str) -> WatchLoadResponse:
    return next(each for each in view.workers if each.info.worker_id == name).load


async def test_what_a_dead_router_had_is_freed_in_every_phase() -> None:
    """Killed while its requests are queued and computing and receiving, and again while they decode: the workers hear
    of it by its sessions and calls, and the other router's answers are not touched."""
    async with two_routers() as (cluster, second):
        for index in range(3):
            second.begin(request(prompt(1500, 1 + index), 5))
        await cluster.until(
            lambda view: load(view, "prefill-0").waiting_requests == 2 and load(view, "decode-0").used_blocks > 90
        )
        await second.die()
        await cluster.empty()

        short = prompt(20, 9)
        assert (await cluster.ask(request(short, 2), timeout_s=3)).token_ids == oracle(short, 2)


async def test_a_dead_router_that_decodes_leaves_nothing_and_others_are_not_touched() -> None:
    async with two_routers() as (cluster, second):
        mine = asyncio.create_task(cluster.ask(request(prompt(60, 20), 300)))
        second.begin(request(prompt(60, 21), 20_000))
        await cluster.until(lambda view: load(view, "decode-0").running_requests == 2)
        await second.die()
        assert (await mine).token_ids == oracle(prompt(60, 20), 300)
        await cluster.empty()


async def test_kv_that_is_held_for_a_dead_router_is_freed() -> None:
    """Its prompt is computed, and the decode worker is stopped before it fetches it; no lease ends meanwhile."""
    own = {"prefill-0": ("--kv-lease-s", "300")}
    async with two_routers(("--reference-late",), own) as (cluster, second):
        cluster.signal("decode-0", signal.SIGSTOP)
        second.begin(request(prompt(600, 30), 400))
        await cluster.until(lambda view: load(view, "prefill-0").held_blocks == 38)
        await second.die()
        await cluster.until(lambda view: load(view, "prefill-0").used_blocks == 0)
        cluster.signal("decode-0", signal.SIGCONT)
        await cluster.ready(2)
        await cluster.empty()
        short = prompt(20, 31)
        assert (await cluster.ask(request(short, 2))).token_ids == oracle(short, 2)


async def test_two_routers_do_not_over_commit_a_decode_worker() -> None:
    """Each answer takes 40 of 64 blocks: whoever comes second waits in its router, at no cost of an attempt more than
    the one that found out, and nothing is preempted or computed twice."""
    async with two_routers(own_flags={"decode-0": ("--reference-blocks", "64")}) as (cluster, second):
        before = await cluster.empty()
        prompts = [prompt(600, 40 + index) for index in range(4)]
        asked = [asyncio.create_task(cluster.ask(request(tokens, 30))) for tokens in prompts[:2]]
        asked += [asyncio.create_task(second.ask(request(tokens, 30))) for tokens in prompts[2:]]
        answers = await asyncio.gather(*asked)
        assert [answer.token_ids for answer in answers] == [oracle(tokens, 30) for tokens in prompts]
        after = await cluster.empty()
        computed = [
            load(after, name).computed_prompt_tokens - load(before, name).computed_prompt_tokens
            for name in ("prefill-0", "decode-0")
        ]
        assert computed == [2400, 0]
