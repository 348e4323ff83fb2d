"""The controller of roles on a cluster: a worker changes sides under load, and nobody notices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from cluster.reference_cluster import Answer, Cluster, request, running
from twostroke.config import RouterSettings, RpcSettings, load
from twostroke.engine.reference_model import expected_tokens
from twostroke.free_port import free_port
from twostroke.policy.ratio import Mode, RatioSettings
from twostroke.router.assembly import Router
from twostroke.router.roles import RoleDriver
from twostroke.rpc.channel import connect
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub
from twostroke.v1.worker_pb2 import ROLE_PREFILL

# A prompt of 1000 tokens takes half a second, and one prefill worker of four is not enough for them.
WORKERS = ("--reference-token-us", "500", "--step-budget-tokens", "64")
QUICK = RatioSettings(Mode.ON, hold_s=0.5, dwell_s=60, drain_s=10, both=False)


@asynccontextmanager
async def eager_router(cluster: Cluster) -> AsyncIterator[tuple[Router, InferenceServiceStub]]:
    """A second router, in this process, whose controller is in a hurry."""
    port = free_port("127.0.0.1")
    workers = ",".join(f"127.0.0.1:{port}" for name, port in cluster.ports.items() if name != "router")
    settings = load(
        RouterSettings, front_end="plain", grpc_port=port, workers=workers, slo="default=1000/100", metrics=False
    )
    router, stop = Router(settings), asyncio.Event()
    dispatcher = router.dispatcher
    dispatcher.roles = RoleDriver(dispatcher.pool, dispatcher.demand, QUICK, look_s=0.2)
    task = asyncio.create_task(router.run(stop))
    channel = connect(f"127.0.0.1:{port}", RpcSettings())
    try:
        while dispatcher.waiting_for():
            await dispatcher.pool.wait_state_changed()
        yield router, InferenceServiceStub(channel)
    finally:
        await channel.close()
        stop.set()
        await task


async def test_a_role_changes_under_load_and_nothing_is_lost() -> None:
    answers: list[tuple[list[int], Answer]] = []
    over = asyncio.Event()

    async with running(decode=3, worker_flags=WORKERS) as cluster, eager_router(cluster) as (router, stub):

        async def client(number: int) -> None:
            salt = 1000 * number
            while not over.is_set():
                salt += 1
                tokens = [(i * 7919 + salt * 104729) % 40000 for i in range(1000)]
                answer = Answer()
                async for piece in stub.Generate(request(tokens, 6), timeout=30):
                    answer.token_ids.extend(piece.token_ids)
                    answer.pieces.append(piece)
                answers.append((tokens, answer))

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        view = await cluster.until(lambda view: sum(each.load.role == ROLE_PREFILL for each in view.workers) == 2)
        flipped = next(
            each.info.worker_id
            for each in view.workers
            if each.load.role == ROLE_PREFILL and each.info.worker_id != "prefill-0"
        )
        seen = len(answers)
        while not any(answer.last.timeline.prefill_worker_id == flipped for _, answer in answers[seen:]):
            await cluster.until(lambda _: True)
            await asyncio.wait(clients, timeout=0.1)
        over.set()
        await asyncio.gather(*clients)
        assert router.dispatcher.roles.changes == 1
        assert router.dispatcher.pool.resting == frozenset()
        for tokens, answer in answers:
            assert answer.token_ids == expected_tokens(tokens, SamplingParams(temperature=0), 6)
            assert answer.last.timeline.attempts == 1
