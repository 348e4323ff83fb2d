"""What happens to requests while the cluster is broken on purpose? `python -m twostroke.bench.faults`; writes
build/bench/faults.json.

Routers and workers on the reference engine, whose every answer is known beforehand, under a steady load of streams. One
fault after another: a worker or a router is killed and started again, stopped and continued; the connection between the
routers and a worker is reset, or swallows everything. Every token of every answer is compared. A stream that its router
takes along, or that a router refuses as it has only just come (UNAVAILABLE), is asked for again at another router, as
any client does; all else is the cluster's own work.

Recovery is the time from a fault to the next token of a stream that it held up.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import grpc.aio
import typer

from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.fault_cluster import FaultCluster, fault_cluster
from twostroke.bench.record import Record
from twostroke.bench.running import Say
from twostroke.engine.reference_model import expected_tokens
from twostroke.rpc.status import to_error
from twostroke.v1.engine_pb2 import SamplingParams, TokenSequence
from twostroke.v1.inference_pb2 import GenerateRequest

KINDS = ("kill worker", "stop worker", "reset connection", "swallow connection", "kill router", "stop router")
WORKER_FLAGS = ("--reference-step-ms=10", "--reference-token-us=50", "--kv-stall-s=2", "--stall-s=2")
ROUTER_FLAGS = ("--worker-timeout-s=1.2", "--handoff-timeout-s=5", "--prefill-attempts=6")
VOCABULARY = 40_000
HELD_UP_S = 0.25
"""A gap between two tokens that no step explains."""
REQUEST_TIMEOUT_S = 60.0
QUIET_S = 5.0

app = make_app()


@dataclass(slots=True)
class Tally:
    """What came of all requests."""

    sent: int = 0
    complete: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    retried: int = 0
    """Asked again at another router."""
    tokens: list[float] = field(default_factory=list)
    """Moment of every token."""
    gaps: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of every gap longer than HELD_UP_S."""


class Clients:
    """A steady number of streams, each asking again when its answer is complete."""

    def __init__(self, cluster: FaultCluster, streams: int, seed: int) -> None:
        self._cluster = cluster
        self._streams = streams
        self._random = random.Random(seed)  # noqa: S311 not a secret
        self.tally = Tally()
        self.over = asyncio.Event()

    async def run(self) -> None:
        """Until `over` is set and the last answers are complete."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._streams):
                group.create_task(self._client())

    async def _client(self) -> None:
        tally = self.tally
        while not self.over.is_set():
            prompt = self._random.choices(range(VOCABULARY), k=self._random.randint(20, 1200))
            count = self._random.randint(20, 120)
            tally.sent += 1
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    tokens = await self._answer(prompt, count)
            except TimeoutError:
                tally.failed["no answer in time"] += 1
                continue
            except grpc.aio.AioRpcError as error:
                tally.failed[to_error(error).message[:100]] += 1
                continue
            tally.complete += 1
            tally.wrong += tokens != expected_tokens(prompt, SamplingParams(temperature=0), count)

    async def _answer(self, prompt: Sequence[int], count: int) -> list[int]:
        """One answer, from another router when the first one is lost. Raises what a living router said."""
        routers = self._random.sample(self._cluster.routers, len(self._cluster.routers))
        request = GenerateRequest(
            tokens=TokenSequence(token_ids=prompt), sampling=SamplingParams(temperature=0, max_tokens=count)
        )
        while True:
            router = routers.pop(0)
            routers.append(router)
            try:
                return await self._stream(router, request)
            except grpc.aio.AioRpcError as error:
                # The router is gone, or says that it has only just come.
                if error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
            self.tally.retried += 1
            await asyncio.sleep(0.05)

    async def _stream(self, router: str, request: GenerateRequest) -> list[int]:
        tokens: list[int] = []
        last_s: float | None = None
        async for piece in self._cluster.generate(router, request, REQUEST_TIMEOUT_S):
            now_s = time.monotonic()
            if not piece.token_ids:
                continue
            if last_s is not None and now_s - last_s > HELD_UP_S:
                self.tally.gaps.append((last_s, now_s))
            last_s = now_s
            tokens.extend(piece.token_ids)
            self.tally.tokens.extend([now_s] * len(piece.token_ids))
        return tokens


async def break_once(cluster: FaultCluster, kind: str, choose: random.Random) -> float:
    """One fault, and its end. Returns when it began. The victim works again, or restarts, on return."""
    victim = choose.choice(cluster.routers if kind.endswith("router") else cluster.workers)
    began_s = time.monotonic()
    if kind.startswith("kill"):
        await cluster.kill(victim)
        cluster.start(victim)
    elif kind.startswith("stop"):
        cluster.signal(victim, signal.SIGSTOP)
        # Nobody can take over from a router that is stopped: its clients wait as long as it does.
        await asyncio.sleep(choose.uniform(0.2, 1.2 if victim in cluster.routers else 3.0))
        cluster.signal(victim, signal.SIGCONT)
    elif kind == "reset connection":
        cluster.proxies[victim].reset()
    else:
        cluster.proxies[victim].swallow()
        await asyncio.sleep(choose.uniform(0.2, 3.0))
        cluster.proxies[victim].heal()
    return began_s


def recoveries(gaps: Sequence[tuple[float, float]], faults: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """For every gap with a fault in it, the time from the fault to the gap's end, and the kind of the fault."""
    found = []
    for begin_s, end_s in gaps:
        within = [(end_s - fault_s, kind) for fault_s, kind in faults if begin_s - HELD_UP_S <= fault_s <= end_s]
        if within:
            found.append(max(within))
    return found


def percentile(values: Sequence[float], share: float) -> float | None:
    """Of the sorted values; None without any."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None


async def held_after(cluster: FaultCluster) -> int:
    """Blocks in use once there are none, or QUIET_S after the end."""
    deadline_s = time.monotonic() + QUIET_S
    while True:
        view = await cluster.view(cluster.routers[0])
        held = sum(worker.load.used_blocks + worker.load.held_blocks for worker in view.workers)
        if not held or time.monotonic() > deadline_s:
            return held
        await asyncio.sleep(0.1)


async def run(prefill: int, decode: int, routers: int, streams: int, count: int, seed: int) -> None:
    """The whole benchmark."""
    console = make_console()
    say = make_say(console)
    record = Record("faults", command_line("faults"))
    choose = random.Random(seed)  # noqa: S311 not a secret
    faults: list[tuple[float, str]] = []
    async with fault_cluster(prefill, decode, routers, log_folder("faults"), WORKER_FLAGS, ROUTER_FLAGS) as cluster:
        clients = Clients(cluster, streams, seed)
        load = asyncio.create_task(clients.run(), name="clients")
        say(f"{streams} streams on {prefill} prefill and {decode} decode workers behind {routers} routers")
        try:
            await asyncio.sleep(10.0)
            undisturbed_s = time.monotonic()
            for number in range(count):
                kind = choose.choice(KINDS)
                faults.append((await break_once(cluster, kind, choose), kind))
                await cluster.ready()
                await asyncio.sleep(choose.uniform(0.1, 0.5))
                if number % 10 == 9:
                    tally = clients.tally
                    say(f"{number + 1} faults: {tally.complete} answers, {sum(tally.failed.values())} failed")
        finally:
            ended_s = time.monotonic()
            clients.over.set()
            await load
            held = await held_after(cluster)
            _report(record, clients.tally, faults, undisturbed_s, ended_s, held, say)
            finish(record, console)


def _report(
    record: Record,
    tally: Tally,
    faults: Sequence[tuple[float, str]],
    undisturbed_s: float,
    ended_s: float,
    held: int,
    say: Say,
) -> None:
    times = recoveries(tally.gaps, faults)
    for kind in KINDS:
        own = [value for value, other in times if other == kind]
        record.row(
            fault=kind,
            times=sum(other == kind for _, other in faults),
            streams_held_up=len(own),
            recovery_p50_s=percentile(own, 0.5),
            recovery_p99_s=percentile(own, 0.99),
        )
    before = sum(moment < undisturbed_s for moment in tally.tokens) / 10.0
    during = sum(undisturbed_s <= moment < ended_s for moment in tally.tokens) / max(1e-9, ended_s - undisturbed_s)
    failed = sum(tally.failed.values())
    for reason, times_failed in tally.failed.most_common(5):
        say(f"failed {times_failed} times: {reason}")
    record.row(requests=tally.sent, complete=tally.complete, asked_again_at_another_router=tally.retried)
    record.check("requests failed", failed, "", "0", failed == 0)
    record.check("answers with a token lost or doubled", tally.wrong, "", "0", tally.wrong == 0)
    slowest = percentile([value for value, _ in times], 0.99)
    record.check("recovery p99", slowest, "s", "< 2", slowest is not None and slowest < 2)
    record.check(f"blocks held {QUIET_S:g} s after the end", held, "blocks", "0", held == 0)
    share = during / before if before else None
    record.check(
        "tokens per second during the faults / before", share, "", ">= 0.5", share is not None and share >= 0.5
    )


@app.command(help=__doc__)
def main(
    faults: Annotated[int, typer.Option(min=1, help="Faults, one after another.")] = 200,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 64,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers.")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers.")] = 4,
    routers: Annotated[int, typer.Option(min=1, help="Routers.")] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts and faults.")] = 1,
) -> None:
    """Entry point."""
    end("faults", run(prefill, decode, routers, streams, faults, seed))


if __name__ == "__main__":
    app()
