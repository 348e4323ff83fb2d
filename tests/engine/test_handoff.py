"""Our connector on the real engine: two workers, driven as a router drives them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

pytest.importorskip("vllm", reason="the engine is not installed")

from twostroke.bench.handoff import aborts, prompt
from twostroke.bench.record import Record
from twostroke.bench.worker_pair import WorkerPair, worker_pair
from twostroke.errors import TwostrokeError
from twostroke.v1.worker_pb2 import WatchLoadRequest, WatchLoadResponse

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]

STALL_S = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(model: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[WorkerPair]:
    logs = tmp_path_factory.mktemp("pair")
    flags = ("--step-budget-tokens=128", "--max-model-len-tokens=2048", f"--kv-stall-s={STALL_S}")
    async with worker_pair("twostroke", model, Path(logs), lambda text: None, flags) as made:
        yield made


async def until(pair: WorkerPair, role: str, condition: Callable[[WatchLoadResponse], bool], within_s: float) -> None:
    """Returns with the first load report of a worker that the condition holds for."""
    call = pair.workers[role].WatchLoad(WatchLoadRequest(interval_ms=100), timeout=within_s)
    try:
        async for load in call:
            if condition(load):
                return
    finally:
        call.cancel()


async def until_empty(pair: WorkerPair) -> None:
    """Returns when no block is in use on either side."""
    for role in pair.workers:
        await until(pair, role, lambda load: not load.used_blocks and not load.held_blocks, 10)


async def test_the_link_is_tried_with_known_bytes(pair: WorkerPair) -> None:
    found = await pair.probe()
    assert found.bytes_per_s > 1e6
    assert found.lanes
    assert found.rdma == any(lane.startswith(("rc", "dc", "ud", "srd")) for lane in found.lanes)


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 300, 700])
async def test_the_answer_is_that_of_one_engine_and_nothing_is_computed_twice(pair: WorkerPair, tokens: int) -> None:
    """O-01, O-08, O-45: every token, from the first."""
    asked = prompt(tokens, random.Random(tokens))
    answer = await pair.ask(f"two-{tokens}", asked, 12)
    alone = await pair.ask_decode_alone(f"one-{tokens}", asked, 12)
    assert answer.token_ids == alone.token_ids
    assert answer.prompt is not None
    # What is computed is the answer's first token, which came with the KV.
    assert (answer.prompt.transferred_tokens, answer.prompt.computed_tokens) == (tokens, 1)
    await until_empty(pair)


async def test_of_a_known_beginning_only_the_missing_tail_is_fetched(pair: WorkerPair) -> None:
    """O-05: the right blocks, and the answer shows it."""
    generator = random.Random(99)
    first = prompt(256, generator)
    await pair.ask("beginning", first, 4)
    longer = [*first, *prompt(200, generator)]
    before = (await pair.load("decode")).kv_received_bytes
    answer = await pair.ask("longer", longer, 12)
    assert answer.prompt is not None
    assert (answer.prompt.cached_tokens, answer.prompt.transferred_tokens) == (256, 200)
    fetched = (await pair.load("decode")).kv_received_bytes - before
    assert fetched == 2 * 128 * 45 * 1024, "two blocks of 128 tokens, 45 KiB each token"
    assert answer.token_ids == (await pair.ask_decode_alone("longer-alone", longer, 12)).token_ids
    again = await pair.ask("longer-again", longer, 12)
    assert again.token_ids == answer.token_ids
    await until_empty(pair)


async def test_aborts_at_random_moments_leave_no_block_in_use(pair: WorkerPair) -> None:
    """O-25, O-28, O-29, O-30, O-31, O-43, O-46."""
    record = Record("aborts", "")
    await aborts(pair, 60, record, lambda text: None)
    assert [(check.value, check.ok) for check in record.checks] == [(0, True)]
    assert record.rows[0]["aborts"] > 10  # type: ignore[operator]
    asked = prompt(200, random.Random(5))
    assert (await pair.ask("after", asked, 8)).token_ids == (
        await pair.ask_decode_alone("after-alone", asked, 8)
    ).token_ids


async def test_a_prefill_worker_that_is_killed_fails_its_request_alone_and_in_time(pair: WorkerPair) -> None:
    """O-26, O-33, O-41, O-78: decode serves on. The last test of this file: the worker does not come back."""
    asking = asyncio.create_task(pair.ask("doomed", prompt(1900, random.Random(6)), 8))
    await until(pair, "decode", lambda load: load.used_blocks > 0, 60)
    process = psutil.Process(pair.processes["prefill"].pid)
    victims = [process, *process.children(recursive=True)]
    other = asyncio.create_task(pair.ask_decode_alone("survivor", prompt(50, random.Random(7)), 40))
    killed_s = time.monotonic()
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    with pytest.raises(TwostrokeError):
        await asking
    assert time.monotonic() - killed_s < STALL_S + 1
    assert len((await other).token_ids) == 40
    await until(pair, "decode", lambda load: not load.used_blocks, 5)
