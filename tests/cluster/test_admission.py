"""The queue in front of placement: who waits, who is refused and how, what the clients that left cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from cluster.reference_cluster import Answer, Cluster, request, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.errors import DeadlineError, NoWorkerError, OverloadedError, TwostrokeError
from twostroke.rpc.status import to_error
from twostroke.v1.cluster_pb2 import WatchResponse
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.inference_pb2 import GenerateRequest
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

# A prompt token takes half a millisecond, a step reads 64 of them; a decode worker has 64 blocks of 16 tokens, and
# writes slowly, so that what is to be seen meanwhile is seen on a machine that is busy, too.
WORKERS = ("--reference-token-us", "500", "--step-budget-tokens", "64")
SMALL = {"decode-0": ("--reference-blocks", "64", "--reference-step-ms", "15")}
ROUTER = ("--prefill-queue-tokens", "700", "--queue-requests", "3", "--patience-s", "20")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def slow() -> AsyncIterator[Cluster]:
    async with running(worker_flags=WORKERS, own_flags=SMALL, router_flags=ROUTER) as cluster:
        yield cluster


def prompt(tokens: int, salt: int) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def load(view: WatchResponse, name: str) -> tuple[int, int]:
    found = next(each for each in view.workers if each.info.worker_id == name).load
    return found.waiting_requests + found.running_requests, found.used_blocks


async def refusal(cluster: Cluster, wanted: GenerateRequest, timeout_s: float = 20.0) -> TwostrokeError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.ask(wanted, timeout_s)
    return to_error(caught.value)


def ask_as(cluster: Cluster, tenant: str, wanted: GenerateRequest) -> asyncio.Task[Answer]:
    async def ask() -> Answer:
        answer, stub = Answer(), InferenceServiceStub(cluster.channel)
        async for piece in stub.Generate(wanted, timeout=20, metadata=(("x-twostroke-tenant", tenant),)):
            answer.token_ids.extend(piece.token_ids)
            answer.pieces.append(piece)
        return answer

    return asyncio.create_task(ask())


async def test_no_prompt_is_computed_that_has_nowhere_to_go(slow: Cluster) -> None:
    """Two answers that take 40 of 64 blocks each: the second prompt is not read before the first answer is over."""
    first, second = prompt(600, 1), prompt(600, 2)
    asked = [asyncio.create_task(slow.ask(request(first, 200)))]
    await slow.until(lambda view: load(view, "decode-0")[1] >= 38)
    asked.append(asyncio.create_task(slow.ask(request(second, 5))))
    view = await slow.until(lambda view: view.requests == 2)
    assert load(view, "prefill-0")[0] <= 1
    assert load(view, "decode-0")[0] == 1
    answers = await asyncio.gather(*asked)
    assert [answer.token_ids for answer in answers] == [oracle(first, 200), oracle(second, 5)]
    assert answers[1].last.timeline.attempts == 1
    assert answers[1].last.timeline.placed_ms > 100, "it waited in the router"
    await slow.empty()


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back(slow: Cluster) -> None:
    """Three wait behind one that is served; one more is RESOURCE_EXHAUSTED with a time. A more urgent one has a queue
    of its own. What waits has cost the workers nothing when its clients leave."""
    asked = [asyncio.create_task(slow.ask(request(prompt(900, 10), 110)))]
    await slow.until(lambda view: load(view, "decode-0")[1] > 50)
    asked += [asyncio.create_task(slow.ask(request(prompt(900, 11 + i), 50))) for i in range(3)]
    await slow.until(lambda view: view.requests == 4)
    began_s = time.monotonic()
    error = await refusal(slow, request(prompt(900, 20), 50))
    assert time.monotonic() - began_s < 1
    assert type(error) is OverloadedError
    assert "3 requests of priority 0 wait already" in error.message
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 1
    urgent = request(prompt(50, 21), 3)
    urgent.priority = -1
    assert (await slow.ask(urgent)).token_ids == oracle(prompt(50, 21), 3), "it passes what does not fit"
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    view = await slow.empty()
    computed = sum(worker.load.computed_prompt_tokens for worker in view.workers)
    short = prompt(40, 22)
    assert (await slow.ask(request(short, 2))).token_ids == oracle(short, 2)
    view = await slow.empty()
    assert sum(worker.load.computed_prompt_tokens for worker in view.workers) - computed <= 40 + 16


async def test_a_deadline_that_nobody_can_meet_is_refused_before_anything_is_computed(slow: Cluster) -> None:
    await slow.ask(request(prompt(400, 30), 3))
    before = await slow.empty()
    began_s = time.monotonic()
    error = await refusal(slow, request(prompt(1000, 31), 3), timeout_s=0.4)
    assert time.monotonic() - began_s < 0.4, "half a second of prompt"
    assert type(error) is DeadlineError
    assert "predicted" in error.message
    after = await slow.empty()
    tokens = [sum(worker.load.computed_prompt_tokens for worker in view.workers) for view in (before, after)]
    assert tokens[0] == tokens[1]


async def test_work_of_clients_that_left_is_dropped_between_chunks(slow: Cluster) -> None:
    """O-46: long prompts whose clients leave do not delay a short one."""
    asked = [asyncio.create_task(slow.ask(request(prompt(800, 40 + i), 5))) for i in range(3)]
    await slow.until(lambda view: load(view, "prefill-0")[0] > 0)
    for each in asked:
        each.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    short = prompt(20, 45)
    began_s = time.monotonic()
    assert (await slow.ask(request(short, 2))).token_ids == oracle(short, 2)
    assert time.monotonic() - began_s < 0.8, "three prompts of 0.4 s each"
    await slow.empty()


async def test_requests_wait_while_all_decode_workers_are_away_for_a_moment(slow: Cluster) -> None:
    """Design 6, all D: up to the router's patience, here longer than a restart."""
    wanted = prompt(100, 50)
    slow.kill("decode-0")
    await slow.until(lambda view: not view.ready)
    asked = asyncio.create_task(slow.ask(request(wanted, 5)))
    await slow.until(lambda view: view.requests == 1)
    slow.start_worker("decode-0", *WORKERS, *SMALL["decode-0"])
    answer = await asked
    assert answer.token_ids == oracle(wanted, 5)
    assert answer.last.timeline.attempts == 1
    await slow.ready(2)


async def test_no_tenant_has_more_at_work_than_its_cap_and_others_pass_it() -> None:
    flags = ("--tenant-requests", "1")
    async with running(worker_flags=WORKERS, router_flags=flags) as cluster:
        first, other = prompt(1500, 60), prompt(30, 62)
        greedy = [ask_as(cluster, "greedy", request(first, 5)), ask_as(cluster, "greedy", request(first[::-1], 5))]
        view = await cluster.until(lambda view: view.requests == 2 and load(view, "prefill-0")[0] == 1)
        assert load(view, "prefill-0")[0] == 1
        modest = await ask_as(cluster, "modest", request(other, 3))
        assert modest.token_ids == oracle(other, 3)
        assert modest.last.timeline.placed_ms < 100
        answers = await asyncio.gather(*greedy)
        assert [answer.token_ids for answer in answers] == [oracle(first, 5), oracle(first[::-1], 5)]
        assert max(answer.last.timeline.placed_ms for answer in answers) > 500, "its second one waited for its first"


@pytest.mark.parametrize("gone", ["prefill-0", "decode-0"])
async def test_workers_that_stay_away_are_a_503_with_a_time_to_come_back(gone: str) -> None:
    """Design 6, all P and all D: after the router's patience, and then at once."""
    async with running(router_flags=("--patience-s", "0.5")) as cluster:
        cluster.kill(gone)
        await cluster.until(lambda view: not view.ready)
        error = await refusal(cluster, request(prompt(20, 70), 2))
        assert isinstance(error, NoWorkerError)
        assert error.retry_after_s is not None
        began_s = time.monotonic()
        error = await refusal(cluster, request(prompt(20, 71), 2))
        assert isinstance(error, NoWorkerError)
        assert time.monotonic() - began_s < 0.3
        assert not (await cluster.view()).requests
