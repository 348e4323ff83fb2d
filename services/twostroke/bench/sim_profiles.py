"""Profiles of one of our workers in the places where bench-serve's systems have theirs: on a single core, there also
while another one writes answers for clients, on a core with another to spare, and on all cores.

Each is measured several times, in turn: a machine that others use is slow for minutes, of which no median of one minute
knows.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from twostroke.bench.command import log_folder
from twostroke.bench.load import Load, drive, requests
from twostroke.bench.running import Say, running
from twostroke.bench.serve import systems, traffic
from twostroke.bench.serve.play import play
from twostroke.bench.serve.traffic import CHAT, Arrival
from twostroke.bench.stacks import Builder, Served, Stack
from twostroke.config import RpcSettings, child_environment
from twostroke.errors import UnavailableError
from twostroke.launch import devices
from twostroke.launch.model import obtain
from twostroke.measures import SloLimits
from twostroke.sim.profile import Effort, Measured, measure, profile
from twostroke.sim.replica import ReplicaSpec

ONE_CORE, BUSY, SPARE, ALL_CORES = "one-core", "one-core-busy", "spare-core", "all-cores"
PLACES = (ONE_CORE, BUSY, SPARE, ALL_CORES)

_PASSES = 3
_CHAT_TOKENS, _CHATS, _CHAT_EVERY_S = 44, 9, 0.4
"""Of a chat's prompt, as in the middle of the arrivals, and how many are asked for the time outside the engine."""
_EFFORT = Effort(prompts=(16, _CHAT_TOKENS, 128, 512, 1024, 2048, 4096), repeats=1)
_PAUSE_S = 0.25
_COMPANY, _COMPANY_TOKENS = 4, 400
"""Clients of a busy worker, and the length of their answers."""


async def profiled(folder: Path, say: Say) -> dict[str, ReplicaSpec]:
    """By place; measured unless the folder, which exists, has them all. Cancellation takes everything down."""
    paths = {place: folder / f"{place}.json" for place in PLACES}
    if all(path.exists() for path in paths.values()):
        say(f"{folder} has profiles already; remove them to measure again")
    else:
        found: dict[str, list[Measured]] = {place: [] for place in PLACES}
        ttfts_s: list[float] = []
        for number in range(_PASSES):
            say(f"pass {number + 1} of {_PASSES}")
            ttfts_s += await _pass(found, say)
        for place, path in paths.items():
            made = profile(found[place])
            if place == BUSY:
                made = replace(made, hop_s=hop_s(ttfts_s, found[BUSY]))
            made.save(path)
            say(f"written to {path}: median error {made.median_error:.1%} of {made.samples} samples")
    return {place: ReplicaSpec(str(path)) for place, path in paths.items()}


def hop_s(ttfts_s: Sequence[float], measured: Sequence[Measured]) -> float:
    """What the first token of a chat takes more than the step of such a prompt, in the middle of both."""
    steps_s = [each.seconds for one in measured for each in one.samples if each.prefill_tokens == _CHAT_TOKENS]
    return max(0.0, statistics.median(ttfts_s) - statistics.median(steps_s))


async def _pass(found: Mapping[str, list[Measured]], say: Say) -> list[float]:
    """Once everywhere; returns what first tokens of chats took beside the company."""
    ttfts_s: list[float] = []
    for place in (ONE_CORE, SPARE, ALL_CORES):
        stack = _stack(place, say)
        async with running([stack], log_folder(f"sim_serve/{place}"), say) as ((served, _),):
            # Decode for the place alone and prefill, whose steps depend on what others do, for those with company.
            first, last = (_address(stack, stack.front_ends[index]) for index in (0, -1))
            found[place].append(await _measure(last if place == ONE_CORE else first, place, _EFFORT, say))
            if place == ONE_CORE:
                async with company(stack.address):
                    found[BUSY].append(await _measure(first, BUSY, replace(_EFFORT, pause_s=_PAUSE_S), say))
                    ttfts_s = await _ttfts_s(stack.address)
            served.check_alive()
    return ttfts_s


async def _measure(address: str, place: str, effort: Effort, say: Say) -> Measured:
    return await measure(address, effort, lambda text: say(f"{place}: {text}"), RpcSettings())


@asynccontextmanager
async def company(address: tuple[str, int]) -> AsyncIterator[asyncio.Task[Load]]:
    """Clients that read answers all the time, as a task that ends when one fails. Raises UnavailableError then.
    Cancellation ends them."""
    asked = requests("company", _CHAT_TOKENS, _COMPANY_TOKENS)
    clients = asyncio.create_task(drive(address, asked, _COMPANY, math.inf, lambda: None))
    try:
        yield clients
    finally:
        clients.cancel()
        await asyncio.wait([clients])
    if not clients.cancelled():
        clients.result()


async def _ttfts_s(address: tuple[str, int]) -> list[float]:
    """What first tokens of chats take. Raises UnavailableError."""
    chats = [Arrival(index * _CHAT_EVERY_S, CHAT, _CHAT_TOKENS, 2) for index in range(_CHATS)]
    seen = await play(address, chats, traffic.bodies(chats, "hop"), lambda: None)
    if broken := [each.error for each in seen if each.error]:
        raise UnavailableError(f"the time outside the engine could not be measured: {broken[0]}")
    return [each.ttft_s for each in seen]


def _stack(place: str, say: Say) -> Stack:
    """Two of our workers on a core each, or one on all cores."""
    environment = child_environment()
    found = devices.detect(environment)
    chunk = systems.DEFAULT_CHUNK_TOKENS if place == ALL_CORES else systems.OUR_CHUNK_TOKENS
    served = Served(obtain("", say), systems.KV_BYTES, systems.MAX_MODEL_LEN_TOKENS, chunk)
    flags = ("--most-step-s=0",) if place == SPARE else ("--most-step-s=0", "--spare-cores=")
    asked = systems.router_args(systems.STRICT, {CHAT: SloLimits()})
    pair = Builder(served, found, environment).twostroke(flags, asked)
    return alone(pair, found.cores) if place == ALL_CORES else pair


def alone(pair: Stack, cores: Sequence[int]) -> Stack:
    """The decode worker of a pair as the only worker, for both strokes, on these cores."""
    ((router, *workers),) = pair.stages
    worker = workers[-1]
    flags = {"--role": "both", "--cores": ",".join(map(str, cores)), "--spare-cores": ""}
    command = tuple(_with(argument, flags) for argument in worker.command)
    only = {"--workers": worker.address}
    router = replace(router, command=tuple(_with(argument, only) for argument in router.command))
    return replace(pair, stages=((router, replace(worker, command=command)),), front_ends=(worker.name,))


def _with(argument: str, flags: Mapping[str, str]) -> str:
    name, equals, _ = argument.partition("=")
    return f"{name}={flags[name]}" if equals and name in flags else argument


def _address(stack: Stack, name: str) -> str:
    return next(spec.address for spec in stack.processes if spec.name == name)
