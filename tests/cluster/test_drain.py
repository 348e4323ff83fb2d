"""Workers that leave, come back and change their role while requests run."""

from __future__ import annotations

import asyncio
import signal

import pytest

from cluster.reference_cluster import Answer, Cluster, request, running
from twostroke.engine.reference_model import expected_tokens
from twostroke.launch import cluster as commands
from twostroke.v1.cluster_pb2 import WORKER_STATE_DRAINING, WORKER_STATE_READY, WatchResponse
from twostroke.v1.engine_pb2 import SamplingParams
from twostroke.v1.worker_pb2 import ROLE_BOTH, ROLE_DECODE, ROLE_PREFILL

SLOW = ("--reference-step-ms", "20")


def prompt(salt: int, tokens: int = 40) -> list[int]:
    return [(i * 7919 + salt * 104729) % 40000 for i in range(tokens)]


def oracle(tokens: list[int], count: int) -> list[int]:
    return expected_tokens(tokens, SamplingParams(temperature=0), count)


def router(cluster: Cluster) -> str:
    return f"127.0.0.1:{cluster.ports['router']}"


def state_of(view: WatchResponse, name: str) -> int:
    return next((each.state for each in view.workers if each.info.worker_id == name), 0)


def requests_on(view: WatchResponse, name: str) -> int:
    return next((each.router_requests for each in view.workers if each.info.worker_id == name), 0)


async def busy(cluster: Cluster) -> tuple[str, str]:
    """A decode worker that writes answers, and the other one."""
    names = ("decode-0", "decode-1")
    view = await cluster.until(lambda view: any(requests_on(view, name) for name in names))
    name = max(names, key=lambda name: requests_on(view, name))
    return name, next(other for other in names if other != name)


async def test_a_drained_worker_finishes_its_streams_and_leaves() -> None:
    async with running(decode=2, worker_flags=(*SLOW, "--drain-s", "20")) as cluster:
        asked = [asyncio.create_task(cluster.ask(request(prompt(salt), 60))) for salt in range(4)]
        name, other = await busy(cluster)
        running_there = await commands.drain(router(cluster), name, 5.0)
        assert running_there > 0
        view = await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_DRAINING)
        assert view.ready
        late = await cluster.ask(request(prompt(9), 5))
        assert late.last.timeline.decode_worker_id == other
        assert await asyncio.to_thread(cluster.wait_exit, name) == 0
        for salt, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.token_ids == oracle(prompt(salt), 60)
            assert answer.last.timeline.attempts == 1, "nothing had to move"
        cluster.start_worker(name, *SLOW)
        await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_READY)


async def test_streams_that_outlast_the_drain_are_moved_without_a_seam() -> None:
    async with running(decode=2, worker_flags=(*SLOW, "--drain-s", "0.3")) as cluster:
        asked = [asyncio.create_task(cluster.ask(request(prompt(salt), 100))) for salt in range(4)]
        name, _ = await busy(cluster)
        await commands.drain(router(cluster), f"127.0.0.1:{cluster.ports[name]}", 5.0)
        answers = await asyncio.gather(*asked)
        for salt, answer in enumerate(answers):
            assert answer.token_ids == oracle(prompt(salt), 100)
        assert max(answer.last.timeline.attempts for answer in answers) == 2
        assert await asyncio.to_thread(cluster.wait_exit, name) == 0


async def test_a_prefill_worker_that_drains_stays_until_its_kv_was_fetched() -> None:
    """O-89."""
    flags = ("--reference-token-us", "500", "--step-budget-tokens", "64", "--drain-s", "20")
    async with running(prefill=2, decode=1, worker_flags=flags) as cluster:
        tokens = prompt(1, 1500)
        asked = asyncio.create_task(cluster.ask(request(tokens, 10)))
        view = await cluster.until(lambda view: any(each.load.pending_prompt_tokens for each in view.workers))
        name = next(each.info.worker_id for each in view.workers if each.load.pending_prompt_tokens)
        cluster.signal(name, signal.SIGTERM)
        await cluster.until(lambda view: state_of(view, name) == WORKER_STATE_DRAINING)
        answer = await asked
        assert answer.token_ids == oracle(tokens, 10)
        assert (answer.last.timeline.prefill_worker_id, answer.last.timeline.attempts) == (name, 1)
        assert await asyncio.to_thread(cluster.wait_exit, name) == 0


async def test_a_role_changes_at_run_time_and_streams_go_on() -> None:
    async with running(prefill=1, decode=2, worker_flags=SLOW) as cluster:
        asked = [asyncio.create_task(cluster.ask(request(prompt(salt), 60))) for salt in range(4)]
        name, other = await busy(cluster)
        assert await commands.set_role(router(cluster), name, ROLE_PREFILL, 5.0) == ROLE_DECODE
        view = await cluster.until(
            lambda view: any(w.info.worker_id == name and w.load.role == ROLE_PREFILL for w in view.workers)
        )
        assert requests_on(view, name) > 0, "what runs goes on"
        late = [await cluster.ask(request(prompt(salt), 3)) for salt in range(10, 16)]
        assert {answer.last.timeline.decode_worker_id for answer in late} == {other}
        for salt, answer in enumerate(await asyncio.gather(*asked)):
            assert answer.token_ids == oracle(prompt(salt), 60)
        await commands.set_role(router(cluster), "prefill-0", ROLE_DECODE, 5.0)
        await cluster.until(
            lambda view: any(w.info.worker_id == "prefill-0" and w.load.role == ROLE_DECODE for w in view.workers)
        )
        flipped = await cluster.ask(request(prompt(30), 3))
        assert flipped.last.timeline.prefill_worker_id == name
        await commands.set_role(router(cluster), "prefill-0", ROLE_BOTH, 5.0)


async def test_an_unknown_worker_is_named_together_with_the_known_ones() -> None:
    from twostroke.errors import InvalidRequestError

    async with running() as cluster:
        with pytest.raises(InvalidRequestError, match=r"'decode-7'; known are decode-0, prefill-0|prefill-0, decode-0"):
            await commands.drain(router(cluster), "decode-7", 5.0)


@pytest.mark.timeout(120)
async def test_a_rolling_restart_of_every_worker_under_load_fails_no_request() -> None:
    names = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
    async with running(prefill=2, decode=2, worker_flags=("--reference-step-ms", "5", "--drain-s", "0.3")) as cluster:
        over = asyncio.Event()
        answers: list[tuple[list[int], Answer]] = []

        async def client(number: int) -> None:
            salt = number * 1000
            while not over.is_set():
                salt += 1
                tokens = prompt(salt, 100 + salt % 7)
                answers.append((tokens, await cluster.ask(request(tokens, 40))))

        clients = [asyncio.create_task(client(number)) for number in range(6)]
        for name in names:
            epoch = next(w.info.epoch for w in (await cluster.ready(4)).workers if w.info.worker_id == name)
            cluster.signal(name, signal.SIGTERM)
            assert await asyncio.to_thread(cluster.wait_exit, name) == 0
            cluster.start_worker(name, "--reference-step-ms", "5", "--drain-s", "0.3")
            await cluster.until(
                lambda view, name=name, epoch=epoch: any(
                    w.info.worker_id == name and w.info.epoch != epoch and w.state == WORKER_STATE_READY
                    for w in view.workers
                )
            )
        over.set()
        await asyncio.gather(*clients)
        assert len(answers) > 20
        for tokens, answer in answers:
            assert answer.token_ids == oracle(tokens, 40)
        await cluster.empty()
