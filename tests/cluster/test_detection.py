"""Workers that do not die but stop: they are noticed, their requests go on elsewhere, and they are taken back."""

from __future__ import annotations

import asyncio
import json
import signal
import time

from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.reference_cluster import Cluster, request, running
from twostroke.config import RpcSettings
from twostroke.engine.reference_model import expected_tokens
from twostroke.rpc.channel import connect
from twostroke.v1.cluster_pb2 import WORKER_STATE_QUIET, WORKER_STATE_READY, WORKER_STATE_UNREACHABLE, WatchResponse
from twostroke.v1.engine_pb2 import SamplingParams

STEP = ("--reference-step-ms", "20")


def prompt(salt: int, tokens: int = 40) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def state_of(view: WatchResponse, name: str) -> int:
    return next((each.state for each in view.workers if each.info.worker_id == name), 0)


async def busy(cluster: Cluster) -> str:
    """A decode worker that writes an answer."""
    view = await cluster.until(
        lambda view: any(w.router_requests and w.load.generated_tokens > 3 for w in view.workers)
    )
    return next(w.info.worker_id for w in view.workers if w.router_requests and w.load.generated_tokens > 3)


async def health_of(cluster: Cluster, name: str, changes: int) -> list[str]:
    """What a worker says to those that watch its health, up to so many changes."""
    async with connect(f"127.0.0.1:{cluster.ports[name]}", RpcSettings()) as channel:
        asked = health_pb2.HealthCheckRequest(service="twostroke.v1.DecodeService")
        said: list[str] = []
        async for response in health_pb2_grpc.HealthStub(channel).Watch(asked, timeout=30):
            said.append(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
            if len(said) == changes:
                break
        return said


async def test_a_stopped_decode_worker_is_quiet_then_lost_and_its_stream_goes_on() -> None:
    async with running(decode=2, worker_flags=STEP) as cluster:
        asked = asyncio.create_task(cluster.ask(request(prompt(1), 200)))
        name = await busy(cluster)
        cluster.signal(name, signal.SIGSTOP)
        stopped_s = time.monotonic()
        await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_QUIET)
        late = await cluster.ask(request(prompt(2), 3))
        assert late.last.timeline.decode_worker_id != name
        await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_UNREACHABLE)
        assert time.monotonic() - stopped_s < 6
        answer = await asked
        assert answer.token_ids == oracle(prompt(1), 200)
        assert answer.last.timeline.attempts == 2
        cluster.signal(name, signal.SIGCONT)
        await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_READY)
        await cluster.empty()


async def test_a_stopped_prefill_worker_loses_its_prompt_to_another() -> None:
    flags = ("--reference-token-us", "500", "--step-budget-tokens", "64")
    async with running(prefill=2, worker_flags=flags) as cluster:
        tokens = prompt(3, 2000)
        asked = asyncio.create_task(cluster.ask(request(tokens, 5)))
        view = await cluster.until(lambda view: any(w.load.pending_prompt_tokens for w in view.workers))
        name = next(w.info.worker_id for w in view.workers if w.load.pending_prompt_tokens)
        cluster.signal(name, signal.SIGSTOP)
        answer = await asked
        assert answer.token_ids == oracle(tokens, 5)
        assert answer.last.timeline.prefill_worker_id != name
        cluster.signal(name, signal.SIGCONT)
        await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_READY)
        await cluster.empty()


async def test_an_engine_that_stalls_is_left_and_taken_back_when_it_steps_again() -> None:
    """O-87: the control path lives, the engine does not."""
    faults = json.dumps([{"fault": "stall", "at_step": 30, "duration_s": 4.0}])
    own = {"decode-0": ("--reference-faults", faults)}
    async with running(decode=2, worker_flags=(*STEP, "--stall-s", "0.6"), own_flags=own) as cluster:
        heard = asyncio.create_task(health_of(cluster, "decode-0", 3))
        answers = await asyncio.gather(*(cluster.ask(request(prompt(salt), 120)) for salt in range(4)))
        for salt, answer in enumerate(answers):
            assert answer.token_ids == oracle(prompt(salt), 120)
        if max(answer.last.timeline.attempts for answer in answers) == 1:
            raise AssertionError(f"decode-0 was not used: {cluster.log('decode-0')}")
        await cluster.until(lambda view: state_of(view, "decode-0") == WORKER_STATE_READY)
        assert "has made no step for" in cluster.log("decode-0")
        assert await heard == ["SERVING", "NOT_SERVING", "SERVING"]
        await cluster.empty()
