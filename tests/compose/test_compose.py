"""The stack of compose.yaml: what its clients get, also while containers are killed, frozen and cut off."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from compose import stack as containers
from compose.stack import KEY, Stack, docker
from twostroke.errors import UnauthenticatedError

pytestmark = [
    pytest.mark.asyncio(loop_scope="package"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(containers.missing()), reason=containers.missing() or "-"),
]
PROMPTS = [[(i * 7919 + number * 101) % 40000 + 100 for i in range(60)] for number in range(6)]


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def stack() -> AsyncIterator[Stack]:
    async with containers.running(os.environ["COMPOSE_TARGET"]) as stack:
        yield stack


@asynccontextmanager
async def load(stack: Stack) -> AsyncIterator[None]:
    """Requests before, during and after what happens within; all answers must be right and complete."""
    count = containers.TOKENS[stack.target]
    expected = [await stack.expected(prompt, count) for prompt in PROMPTS]
    over = asyncio.Event()
    answered = 0

    async def ask(number: int) -> None:
        nonlocal answered
        while True:
            last = over.is_set()
            assert await stack.ask(PROMPTS[number], count) == expected[number]
            answered += 1
            if last:
                return

    async with asyncio.TaskGroup() as group:
        for number in range(len(PROMPTS)):
            group.create_task(ask(number))
        await stack.until(lambda view: view.requests > 0)
        yield
        over.set()
    assert answered >= len(PROMPTS)


async def do(*arguments: str) -> str:
    return await asyncio.to_thread(docker, *arguments)


async def test_it_comes_up_in_time_and_answers(stack: Stack) -> None:
    print(f"from `up` with its image built to a router that is ready: {stack.started_s:.1f} s")
    assert stack.started_s < containers.UP_S[stack.target]
    for prompt in PROMPTS[:2]:
        assert await stack.ask(prompt, 8) == await stack.expected(prompt, 8)
    view = await stack.until(lambda view: sum(worker.load.kv_received_handoffs for worker in view.workers) >= 2)
    assert view.recomputed_prompts == 0


async def test_a_chat_is_answered_over_http(stack: Stack) -> None:
    if stack.target == "reference":
        pytest.skip("the reference target has no vLLM, hence no HTTP")
    async with AsyncOpenAI(base_url=f"http://127.0.0.1:{stack.environment['HTTP_PORT']}/v1", api_key=KEY) as client:
        answer = await client.chat.completions.create(
            model="SmolLM2-135M-Instruct",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            max_tokens=16,
            temperature=0,
        )
    assert "Paris" in (answer.choices[0].message.content or "")


async def test_who_has_no_key_is_not_served_and_no_log_holds_one(stack: Stack) -> None:
    async with stack.client(key=None) as client:
        with pytest.raises(UnauthenticatedError):
            await client.list_models()
    assert KEY not in await asyncio.to_thread(stack.call, "logs", "--no-color")


async def test_containers_may_do_little(stack: Stack) -> None:
    for service in ("router", "prefill", "decode"):
        name = stack.containers(service)[0]
        found = json.loads(await do("inspect", name))[0]
        assert found["HostConfig"]["ReadonlyRootfs"] is True
        assert found["HostConfig"]["CapDrop"] == ["ALL"]
        await stack.healthy(name)
        published = {port for port, where in found["NetworkSettings"]["Ports"].items() if where}
        assert published == ({"8000/tcp", "50051/tcp"} if service == "router" else set())
        assert await do("exec", name, "id", "-u") == "10001"
        assert (
            await do("exec", name, "sh", "-c", "touch /x 2>&1 || true")
            == "touch: cannot touch '/x': Read-only file system"
        )
        assert await do("exec", name, "sh", "-c", "command -v gcc cc ld make || echo none") == "none"


async def test_scaled_up_decode_workers_are_found(stack: Stack) -> None:
    prefill, decode = stack.scale
    await asyncio.to_thread(stack.up, prefill=prefill, decode=decode)
    view = await stack.ready(prefill, decode)
    assert len({worker.info.worker_id for worker in view.workers}) == prefill + decode
    async with load(stack):
        pass


async def test_killed_under_load(stack: Stack) -> None:
    for service in ("decode", "prefill"):
        victim = stack.containers(service)[-1]
        async with load(stack):
            await do("kill", victim)
        await do("start", victim)
    await stack.ready(*stack.scale)


async def test_frozen_under_load(stack: Stack) -> None:
    for service in ("decode", "prefill"):
        victim = stack.containers(service)[0]
        async with load(stack):
            await do("pause", victim)
        await do("unpause", victim)
        await stack.ready(*stack.scale)


async def test_cut_off_under_load(stack: Stack) -> None:
    network = f"{containers.PROJECT}_default"
    for service in ("decode", "prefill"):
        victim = stack.containers(service)[0]
        async with load(stack):
            await do("network", "disconnect", network, victim)
        await do("network", "connect", "--alias", service, network, victim)
        if stack.target != "reference":
            # UCX keeps to the interface that it found at its start, which Docker has replaced by another.
            await do("restart", "-t", "5", victim)
        await stack.ready(*stack.scale)


async def test_stopped_under_load(stack: Stack) -> None:
    victim = stack.containers("decode")[1]
    async with load(stack):
        await do("stop", "-t", "45", victim)
    assert json.loads(await do("inspect", victim))[0]["State"]["ExitCode"] == 0
    await do("start", victim)
    await stack.ready(*stack.scale)


async def test_after_all_of_it_nothing_is_held(stack: Stack) -> None:
    view = await stack.until(
        lambda view: not view.requests and all(not worker.load.held_handoffs for worker in view.workers)
    )
    assert all(worker.load.running_requests == 0 for worker in view.workers)


async def test_spans_arrive(stack: Stack) -> None:
    text = await do("logs", stack.containers("jaeger")[0])
    for name in ("prefill.run", "decode.run", "handoff"):
        assert f"span {name}" in text
