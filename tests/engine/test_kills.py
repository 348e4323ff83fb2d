"""SmolLM2 on two pools whose workers are killed in the middle: nobody can tell by the answers.

Workers that are killed stay away until a test needs more than are left, as where it is run again, and until the last.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import grpc.aio
import psutil
import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="the engine is not installed")

from engine.conftest import MODEL, watch
from twostroke.bench.fault_vllm import FaultStack, fault_stack
from twostroke.bench.stacks import Stack
from twostroke.config import RpcSettings, child_environment
from twostroke.launch import devices, plan
from twostroke.rpc.channel import connect
from twostroke.v1.cluster_pb2 import (
    REQUEST_STATE_RUNNING,
    WORKER_STATE_READY,
    ListRequestsRequest,
    WatchResponse,
)
from twostroke.v1.cluster_pb2_grpc import ClusterServiceStub
from twostroke.v1.engine_pb2 import FINISH_REASON_STOP, Finish, SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import GenerateRequest, Usage
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]

PREFILL, DECODE = 2, 3
WORKER = ("--kv-bytes=134217728", "--max-model-len-tokens=1152", "--step-budget-tokens=512", "--drain-s=1")
ENGINE_LOST = 70
TOKENS = 144
"""So many that an answer which is in its middle is still there when a worker has been chosen and killed."""
HALF_TOKENS = 12
"""When an answer is in its middle."""


def numbers(count: int, salt: int) -> list[int]:
    return [(i * 59 + salt * 7919) % 30000 + 200 for i in range(count)]


def tokens(ids: Sequence[int], **sampling: object) -> GenerateRequest:
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return GenerateRequest(tokens=TokenSequence(token_ids=ids), sampling=params)


# What an answer is continued by may depend on all of its past: sums of it, draws, text that is half of a stop string.
STREAMS = {
    "log probabilities": tokens(numbers(90, 1), temperature=0, logprobs=3),
    "a seed and penalties": tokens(
        numbers(150, 2), temperature=0.8, seed=11, frequency_penalty=0.4, presence_penalty=0.2, repetition_penalty=1.1
    ),
    "a stop string": GenerateRequest(
        text="Count: 1, 2, 3, 4, 5, 6, 7,",
        sampling=SamplingParams(temperature=0, max_tokens=TOKENS, stop=[", 15"]),
    ),
}
LONG = tokens(numbers(1000, 3), temperature=0, logprobs=1)


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    ranked: list[int] = field(default_factory=list)
    """Token ids of the log probabilities."""
    logprobs: list[float] = field(default_factory=list)
    finish: Finish = field(default_factory=Finish)
    usage: Usage = field(default_factory=Usage)
    attempts: int = 0
    workers: tuple[str, str] = ("", "")

    def check(self, undisturbed: Answer) -> None:
        assert self.token_ids == undisturbed.token_ids
        assert self.text == undisturbed.text
        assert self.ranked == undisturbed.ranked
        assert self.logprobs == pytest.approx(undisturbed.logprobs, abs=1e-3)
        assert (self.finish, self.usage) == (undisturbed.finish, undisturbed.usage)


class Asked:
    """An answer that is on its way. half: set in its middle."""

    def __init__(self, channel: grpc.aio.Channel, request: GenerateRequest) -> None:
        self.half = asyncio.Event()
        self.answer = Answer()
        self._channel = channel
        self._request = GenerateRequest()
        self._request.CopyFrom(request)
        # Nobody's KV is here before.
        self._request.cache_salt = uuid4().hex
        self.done = asyncio.create_task(self._read())

    async def _read(self) -> Answer:
        answer = self.answer
        async for piece in InferenceServiceStub(self._channel).Generate(self._request, timeout=120):
            answer.token_ids.extend(piece.token_ids)
            answer.text += piece.text
            answer.ranked.extend(piece.logprobs.token_ids)
            answer.logprobs.extend(piece.logprobs.logprobs)
            if len(answer.token_ids) >= HALF_TOKENS:
                self.half.set()
        answer.finish, answer.usage, timeline = piece.finish, piece.usage, piece.timeline
        answer.attempts = timeline.attempts
        answer.workers = timeline.prefill_worker_id, timeline.decode_worker_id
        return answer


@dataclass
class Pools:
    cluster: FaultStack
    grpc: str
    channel: grpc.aio.Channel
    undisturbed: dict[str, Answer] = field(default_factory=dict)

    def ask(self, request: GenerateRequest) -> Asked:
        return Asked(self.channel, request)

    async def in_the_middle(self) -> dict[str, Asked]:
        """All streams, each written in part; one that was fast, on a worker of its own, perhaps in whole."""
        asked = {name: self.ask(request) for name, request in STREAMS.items()}
        for each in asked.values():
            await asyncio.wait({each.done, asyncio.create_task(each.half.wait())}, return_when=asyncio.FIRST_COMPLETED)
            assert each.half.is_set(), each.done
        assert not all(each.done.done() for each in asked.values())
        return asked

    async def check(self, asked: dict[str, Asked]) -> list[Answer]:
        answers = {name: await each.done for name, each in asked.items()}
        for name, answer in answers.items():
            answer.check(self.undisturbed[name])
        return list(answers.values())

    async def writing(self) -> str:
        """The decode worker of the answer that is furthest from its end: it is not over before its worker dies."""
        listed = await ClusterServiceStub(self.channel).ListRequests(ListRequestsRequest(), timeout=60)
        running = [each for each in listed.requests if each.state == REQUEST_STATE_RUNNING and each.completion_tokens]
        return min(running, key=lambda each: each.completion_tokens).timeline.decode_worker_id

    async def at_least(self, prefill: int, decode: int) -> None:
        """Starts all workers again that are gone if fewer of a kind are left."""
        processes = self.cluster.running.processes
        left = Counter(name.partition("-")[0] for name, process in processes.items() if not process.ended.done())
        if left["prefill"] < prefill or left["decode"] < decode:
            await self.all_back()

    async def all_back(self) -> None:
        """Starts each worker again that is gone; the router takes it as another one."""
        before = {w.address: w.info.epoch for w in (await watch(self.grpc, lambda view: True)).workers}
        gone = [name for name in self.cluster.proxies if self.cluster.running.processes[name].ended.done()]
        for name in gone:
            self.cluster.start(name)
        await self.cluster.ready()
        view = await watch(self.grpc, lambda v: sum(w.state == WORKER_STATE_READY for w in v.workers) == len(before))
        assert sum(w.info.epoch != before[w.address] for w in view.workers) == len(gone)

    async def reading(self) -> str:
        """A prefill worker in the middle of a prompt."""

        def middle(view: WatchResponse) -> list[str]:
            busy = [w.info.worker_id for w in view.workers if w.load.pending_prompt_tokens and w.load.used_blocks]
            return [name for name in busy if name.startswith("prefill")]

        return middle(await watch(self.grpc, middle))[0]

    async def empty(self) -> None:
        """When no block is in use on any worker that is left."""
        await watch(
            self.grpc,
            lambda view: (
                not view.requests
                and not any(
                    w.load.used_blocks or w.load.held_blocks or w.load.held_handoffs
                    for w in view.workers
                    if w.state == WORKER_STATE_READY
                )
            ),
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pools(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pools]:
    environment = child_environment()
    length = WORKER[1]
    options = plan.UpOptions(
        engine="vllm",
        model=model,
        served_model_name="bench",
        prefill=PREFILL,
        decode=DECODE,
        host="127.0.0.1",
        http_port=0,
        grpc_port=0,
        dtype="float32",
        worker_args=WORKER,
        router_args=(length, "--drain-s=1"),
    )
    made = plan.make(options, devices.detect(environment), environment)
    host, _, port = made.http.removeprefix("http://").removesuffix("/v1").rpartition(":")
    names = tuple(worker.name for worker in made.workers)
    stack = Stack(MODEL, (made.processes,), (host, int(port)), (made.router.name,), names)
    async with fault_stack(stack, Path(tmp_path_factory.mktemp("kills")), print) as cluster:
        await cluster.ready()
        async with connect(made.grpc, RpcSettings()) as channel:
            pools = Pools(cluster, made.grpc, channel)
            await watch(made.grpc, lambda view: sum(w.state == WORKER_STATE_READY for w in view.workers) == len(names))
            asked = {name: pools.ask(request) for name, request in STREAMS.items()}
            pools.undisturbed = {name: await each.done for name, each in asked.items()}
            pools.undisturbed["long"] = await pools.ask(LONG).done
            yield pools


async def test_answers_go_on_where_a_decode_worker_is_killed(pools: Pools) -> None:
    await pools.at_least(prefill=1, decode=2)
    asked = await pools.in_the_middle()
    await pools.cluster.kill(await pools.writing())
    answers = await pools.check(asked)
    assert max(answer.attempts for answer in answers) == 2
    stop = pools.undisturbed["a stop string"]
    assert (stop.text, stop.finish.reason) == (" 8, 9, 10, 11, 12, 13, 14", FINISH_REASON_STOP)
    await pools.empty()


async def test_a_prompt_is_read_again_where_a_prefill_worker_is_killed(pools: Pools) -> None:
    await pools.at_least(prefill=2, decode=1)
    asked = {"long": pools.ask(LONG)}
    victim = await pools.reading()
    await pools.cluster.kill(victim)
    (answer,) = await pools.check(asked)
    assert answer.attempts == 2
    assert answer.workers[0] not in ("", victim)
    await pools.empty()


async def test_an_engine_that_is_killed_takes_its_worker_with_it_and_no_answer(pools: Pools) -> None:
    await pools.at_least(prefill=1, decode=2)
    asked = await pools.in_the_middle()
    worker = pools.cluster.running.processes[await pools.writing()]
    engine = next(each for each in psutil.Process(worker.pid).children(recursive=True) if "EngineCor" in each.name())
    os.kill(engine.pid, signal.SIGKILL)
    answers = await pools.check(asked)
    assert max(answer.attempts for answer in answers) == 2
    assert await worker.ended == ENGINE_LOST
    await worker.gone()
    await pools.empty()


async def test_both_kinds_killed_at_once_after_all_have_come_back(pools: Pools) -> None:
    await pools.all_back()
    asked = await pools.in_the_middle()
    writer = await pools.writing()
    asked["long"] = pools.ask(LONG)
    victims = [await pools.reading(), writer]
    await asyncio.gather(*map(pools.cluster.kill, victims))
    answers = await pools.check(asked)
    assert max(answer.attempts for answer in answers) >= 2
    await pools.empty()
