"""What becomes of an answer that is drawn without a seed when its worker is lost, by --unseeded-loss."""

import asyncio
import re

import grpc.aio
import pytest

from cluster.reference_cluster import Cluster, request, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import AnswerLostError
from twostroke.rpc.status import to_error
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2 import GenerateRequest

PROMPT = list(range(100, 400))
FAIL = ("--unseeded-loss", "fail")
STEPS = ("--reference-step-ms", "5")


def drawn(count: int, **sampling: float) -> GenerateRequest:
    wanted = request(PROMPT, count)
    wanted.sampling.MergeFrom(SamplingParams(**sampling))  # type: ignore[arg-type]
    return wanted


async def killed(cluster: Cluster, wanted: GenerateRequest, at: int = 30) -> list[int]:
    """The whole answer, whose decode worker is killed when so much of it has come."""
    tokens: list[int] = []
    async for piece in cluster.stream(wanted):
        tokens.extend(piece.token_ids)
        if len(tokens) == at:
            view = await cluster.view()
            busy = [w.info.worker_id for w in view.workers if w.router_requests]
            cluster.kill(next(name for name in busy if name.startswith("decode")))
    return tokens


async def test_it_is_ended_where_that_is_wanted_and_what_can_be_repeated_goes_on() -> None:
    async with running(decode=3, router_flags=FAIL, worker_flags=STEPS) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await killed(cluster, drawn(120, temperature=1.0))
        error = to_error(caught.value)
        assert type(error) is AnswerLostError
        assert error.retry_after_s == 1.0
        assert re.match(r"after [34]\d tokens", error.message)
        assert "--unseeded-loss" in error.message
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await cluster.empty()

        seeded = SamplingParams(temperature=1.0, seed=7)
        assert await killed(cluster, drawn(120, temperature=1.0, seed=7)) == expected_tokens(PROMPT, seeded, 120)


async def test_the_most_probable_tokens_need_no_seed() -> None:
    async with running(decode=2, router_flags=FAIL, worker_flags=STEPS) as cluster:
        greedy = SamplingParams(temperature=0)
        assert await killed(cluster, drawn(120, temperature=0)) == expected_tokens(PROMPT, greedy, 120)


async def test_one_that_has_not_begun_is_placed_again() -> None:
    flags = ("--reference-token-us", "1000")
    async with running(prefill=2, router_flags=FAIL, worker_flags=flags) as cluster:
        asked = asyncio.create_task(cluster.ask(drawn(8, temperature=1.0)))
        view = await cluster.until(lambda view: any(w.load.running_requests for w in view.workers))
        cluster.kill(next(w.info.worker_id for w in view.workers if w.load.running_requests))
        answer = await asked
        assert len(answer.token_ids) == 8
        assert answer.last.timeline.attempts == 2


async def test_it_goes_on_otherwise() -> None:
    async with running(decode=2, worker_flags=STEPS) as cluster:
        assert len(await killed(cluster, drawn(120, temperature=1.0))) == 120
