"""A part of the fault plan with vLLM's engines: two of ours, each for both strokes, and two vLLM servers behind
vllm-router, which knows nothing better to do with them than to send each request to one.

Both systems have the same model, cores and number of engines, one at a time, and get the same faults in the same order.
Their clients ask over HTTP and try nothing again. An answer is right when its token ids are those of the same system
before anything was broken.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import signal
import time
from array import array
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from twostroke.bench.command import log_folder
from twostroke.bench.fault_plan import WORKER_KINDS, Fault, break_once, goodput, kind_rows
from twostroke.bench.fault_proxy import FaultProxy
from twostroke.bench.load import Answer, Connection, get_status, request_body
from twostroke.bench.record import Record
from twostroke.bench.running import Running, Say, running
from twostroke.bench.stacks import VLLM_ROUTER_INSTALL, Builder, Served, Stack, vllm_router_installed
from twostroke.config import child_environment
from twostroke.errors import ConfigError, UnavailableError
from twostroke.launch import devices
from twostroke.launch.model import obtain
from twostroke.launch.processes import start
from twostroke.rpc.probe import check

STREAMS = 4
HELD_UP_S = 0.5
"""A gap between two tokens that no step explains, nor another prompt."""
PROMPTS = 8
PROMPT_TOKENS, MAX_TOKENS = 200, 64
FAULTS = 8
UNDISTURBED_S = 8.0
BETWEEN_S = 4.0
ENGINE_START_S = 120.0
REQUEST_TIMEOUT_S = 60.0
KV_BYTES = 256 << 20
MAX_MODEL_LEN_TOKENS = 1024
GOAL_S = 5.0
OURS, OUR_ROUTER = ("--role=both", "--stall-s=2"), ("--worker-timeout-s=2",)
# Its defaults look after servers once a minute.
THEIRS = ("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1", "--health-failure-threshold", "1")


@dataclass(slots=True)
class FaultStack:
    """A running system whose workers, or servers, are behind proxies."""

    running: Running
    proxies: dict[str, FaultProxy]

    @property
    def routers(self) -> list[str]:
        """None of them is broken here: there is but one."""
        return []

    async def kill(self, name: str) -> None:
        """Kills a process with its engine; all are gone on return."""
        victim = self.running.processes[name]
        victim.kill_group()
        await victim.gone()

    def start(self, name: str) -> None:
        """Starts it again."""
        spec = next(spec for spec in self.running.stack.processes if spec.name == name)
        self.running.processes[name] = start(spec, self.running.log(name))

    def signal(self, name: str, number: int) -> None:
        """Sends a process and its engine a signal."""
        os.killpg(self.running.processes[name].pid, number)

    async def ready(self) -> None:
        """Returns when all workers or servers say that they serve. Raises UnavailableError after ENGINE_START_S."""
        deadline_s = time.monotonic() + ENGINE_START_S
        for spec in self.running.stack.processes:
            while spec.name in self.proxies and not await _serves(spec.address):
                if time.monotonic() > deadline_s:
                    raise UnavailableError(f"{spec.name} does not serve again; log: {self.running.log(spec.name)}")
                await asyncio.sleep(0.2)


async def _serves(address: str) -> bool:
    host, _, port = address.rpartition(":")
    if await get_status(host, int(port), "/health") == 200:
        return True
    return await asyncio.to_thread(check, address, "twostroke.v1.DecodeService") == "SERVING"


@asynccontextmanager
async def fault_stack(stack: Stack, logs: Path, say: Say, *router_args: str) -> AsyncIterator[FaultStack]:
    """Starts a system with proxies before all that it places requests on.

    logs: an existing folder. router_args: further arguments of its router.
    """
    async with AsyncExitStack() as exits:
        proxies: dict[str, FaultProxy] = {}
        commands = {spec.name: spec.command for spec in stack.processes}
        for name in stack.front_ends:
            address = next(spec.address for spec in stack.processes if spec.name == name)
            proxies[name] = await exits.enter_async_context(FaultProxy(address))
            for router in stack.routers:
                command = commands[router]
                commands[router] = tuple(part.replace(address, proxies[name].address) for part in command)
        for router in stack.routers:
            commands[router] += router_args
        stages = tuple(tuple(replace(spec, command=commands[spec.name]) for spec in stage) for stage in stack.stages)
        started = await exits.enter_async_context(running([replace(stack, stages=stages)], logs, say))
        cluster = FaultStack(started[0][0], proxies)
        try:
            yield cluster
        finally:
            for name in proxies:
                if not cluster.running.processes[name].ended.done():
                    cluster.signal(name, signal.SIGCONT)


@dataclass(slots=True)
class Tally:
    """What came of all requests of one system."""

    complete: int = 0
    wrong: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    moments: array[float] = field(default_factory=lambda: array("d"))
    gaps: list[tuple[float, float]] = field(default_factory=list)


def _bodies() -> list[bytes]:
    source = random.Random(7)  # noqa: S311 not a secret
    prompts = [[source.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)] for _ in range(PROMPTS)]
    return [
        json.dumps(json.loads(request_body(prompt, MAX_TOKENS)) | {"return_token_ids": True}).encode()
        for prompt in prompts
    ]


def _ids(answer: Answer) -> list[int]:
    return [
        token for event in answer.events() for choice in event["choices"] for token in choice.get("token_ids") or ()
    ]


async def _ask(address: tuple[str, int], body: bytes) -> Answer:
    async with asyncio.timeout(REQUEST_TIMEOUT_S):
        connection = await Connection.open(*address)
        try:
            return await connection.ask(body)
        finally:
            connection.close()


async def _client(
    address: tuple[str, int],
    bodies: list[bytes],
    expected: list[list[int]],
    number: int,
    over: asyncio.Event,
    tally: Tally,
) -> None:
    while not over.is_set():
        number = (number + 1) % len(bodies)
        try:
            answer = await _ask(address, bodies[number])
            ids, times_s = _ids(answer), answer.token_times_s()
        except (OSError, TimeoutError, UnavailableError) as error:
            tally.failed[str(error)[:100] or type(error).__name__] += 1
            # Who is refused at once would else be most of the load.
            await asyncio.sleep(HELD_UP_S)
            continue
        tally.complete += 1
        tally.wrong += ids != expected[number]
        tally.moments.extend(times_s)
        tally.gaps += [(a, b) for a, b in pairwise(times_s) if b - a > HELD_UP_S]


async def _measure(cluster: FaultStack, seed: int, say: Say) -> tuple[Tally, list[Fault], tuple[float, float]]:
    address, bodies, tally, over = cluster.running.stack.address, _bodies(), Tally(), asyncio.Event()
    expected = [_ids(await _ask(address, body)) for body in bodies]
    choose = random.Random(seed)  # noqa: S311 not a secret
    faults: list[Fault] = []
    async with asyncio.TaskGroup() as group:
        for number in range(STREAMS):
            group.create_task(_client(address, bodies, expected, number, over, tally))
        begin_s = time.monotonic()
        await asyncio.sleep(UNDISTURBED_S)
        undisturbed = begin_s, time.monotonic()
        for number in range(FAULTS):
            kind = WORKER_KINDS[number % len(WORKER_KINDS)]
            began_s = time.monotonic()
            await break_once(cluster, kind, choose)
            await cluster.ready()
            faults.append(Fault(kind, began_s, time.monotonic()))
            await asyncio.sleep(BETWEEN_S)
            say(f"{number + 1} faults: {tally.complete} answers, {sum(tally.failed.values())} failed")
        over.set()
    return tally, faults, undisturbed


async def _one(record: Record, stack: Stack, seed: int, say: Say, *router_args: str) -> tuple[int, int, float | None]:
    """Measures one system. Returns requests that failed, answers that were wrong, and the slowest recovery."""
    name = f"{stack.name}, vLLM"
    async with fault_stack(stack, log_folder("faults-vllm"), say, *router_args) as cluster:
        tally, faults, undisturbed = await _measure(cluster, seed, say)
    slowest = kind_rows(record, name, tally.gaps, faults)
    failed = sum(tally.failed.values())
    for reason, times in tally.failed.most_common(3):
        say(f"{stack.name} failed {times} times: {reason}")
    record.row(
        system=name,
        times=len(faults),
        requests=tally.complete + failed,
        complete=tally.complete,
        failed=failed,
        wrong=tally.wrong,
        tokens_per_s_share=goodput(sorted(tally.moments), faults, undisturbed),
    )
    return failed, tally.wrong, slowest


async def compare(record: Record, seed: int, say: Say) -> None:
    """Both systems, one after the other. What cannot be run here is a check that is not ok."""
    if importlib.util.find_spec("vllm") is None:
        say("vLLM is not installed, its checks will fail; `make install` installs it")
        record.check("requests failed, vLLM", None, "", "0", ok=False)
        return
    environment = child_environment()
    found = devices.detect(environment)
    if found.gpus:
        raise ConfigError("the part with vLLM places engines on CPU cores; leave it out with --engine reference")
    builder = Builder(Served(obtain("", say), KV_BYTES, MAX_MODEL_LEN_TOKENS), found, environment)
    failed, wrong, slowest = await _one(record, builder.twostroke(OURS, OUR_ROUTER), seed, say)
    record.check("requests failed, vLLM", failed, "", "0", failed == 0)
    record.check("answers that differ from the undisturbed ones, vLLM", wrong, "", "0", wrong == 0)
    record.check(
        f"recovery p99, vLLM, {STREAMS} streams",
        slowest,
        "s",
        f"< {GOAL_S:g}",
        slowest is not None and slowest < GOAL_S,
    )
    if vllm_router_installed():
        theirs, _, _ = await _one(record, builder.round_robin(), seed, say, *THEIRS)
        record.check("requests failed under the same plan, vllm-router", theirs, "", "more than ours", theirs > failed)
    else:
        say(f"vllm-router is not installed; install it with: {VLLM_ROUTER_INSTALL}")
        record.check("requests failed under the same plan, vllm-router", None, "", "more than ours", ok=False)
