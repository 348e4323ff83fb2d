"""What happens to requests while the cluster is broken on purpose? `python -m twostroke.bench.faults`; writes
build/bench/faults.json.

Routers and workers on the reference engine, whose every answer is known beforehand, under a steady load of streams. One
fault after another: a worker or a router is killed and started again, stopped and continued; the connection between the
routers and a worker is reset, or swallows everything. Every token of every answer is compared. Then a part of the same
with vLLM: two engines of ours, and two vLLM servers behind vllm-router, against their own undisturbed answers.

Recovery is the time from a fault to the next token of a stream that it held up, the time in which a client finds out
that its router is gone included.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

import typer

from twostroke.bench import fault_vllm
from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.fault_cluster import FaultCluster, fault_cluster
from twostroke.bench.fault_load import Clients, Tally
from twostroke.bench.fault_plan import KINDS, Fault, break_once, goodput, kind_rows
from twostroke.bench.record import Record
from twostroke.bench.running import Say

# Steps as slow as those of a large model: one machine has to bear all engines, routers and clients.
WORKER_FLAGS = ("--reference-step-ms=25", "--reference-token-us=30", "--kv-stall-s=2", "--stall-s=2")
ROUTER_FLAGS = ("--worker-timeout-s=1", "--handoff-timeout-s=5", "--prefill-attempts=6")
UNDISTURBED_S = 10.0
QUIET_S = 5.0
LOOK_S = 0.1
FAULTS_AT_ONCE = 10
"""Between two looks at what is left on the workers."""

app = make_app()


class Engine(StrEnum):
    """What the workers run."""

    ALL = "all"
    REFERENCE = "reference"
    VLLM = "vllm"


@dataclass(slots=True)
class Course:
    """How it went."""

    faults: list[Fault] = field(default_factory=list)
    undisturbed: tuple[float, float] = (0.0, 0.0)
    stranded_block_s: float = 0.0
    """KV blocks in use while no request was, times how long."""
    held: int = 0
    """Blocks that were in use QUIET_S after the last request."""


async def look(cluster: FaultCluster, course: Course) -> None:
    """What is left on the workers when no request runs, until nothing is or for QUIET_S."""
    began_s = seen_s = time.monotonic()
    while True:
        view = await cluster.view(cluster.routers[0])
        course.held = sum(worker.load.used_blocks + worker.load.held_blocks for worker in view.workers)
        now_s = time.monotonic()
        course.stranded_block_s += course.held * (now_s - seen_s)
        seen_s = now_s
        if not course.held or now_s - began_s > QUIET_S:
            return
        await asyncio.sleep(LOOK_S)


async def disturb(cluster: FaultCluster, clients: Clients, course: Course, count: int, seed: int, say: Say) -> None:
    """So many faults of all kinds in turn, at random victims."""
    choose = random.Random(seed)  # noqa: S311 not a secret
    kinds: list[str] = []
    begin_s = time.monotonic()
    await asyncio.sleep(UNDISTURBED_S)
    course.undisturbed = (begin_s, time.monotonic())
    while len(course.faults) < count:
        kinds = kinds or choose.sample(KINDS, len(KINDS))
        kind = kinds.pop()
        began_s = time.monotonic()
        await break_once(cluster, kind, choose)
        await cluster.ready()
        course.faults.append(Fault(kind, began_s, time.monotonic()))
        await asyncio.sleep(choose.uniform(0.1, 0.5))
        if len(course.faults) % FAULTS_AT_ONCE == 0:
            await clients.pause()
            await look(cluster, course)
            clients.resume()
            tally = clients.tally
            say(
                f"{len(course.faults)} faults: {tally.complete} answers, {sum(tally.failed.values())} failed, "
                f"{course.stranded_block_s:.0f} block-seconds stranded"
            )


async def reference(
    record: Record, prefill: int, decode: int, routers: int, streams: int, count: int, seed: int, say: Say
) -> None:
    """The part on the reference engine."""
    course = Course()
    async with fault_cluster(prefill, decode, routers, log_folder("faults"), WORKER_FLAGS, ROUTER_FLAGS) as cluster:
        clients = Clients(cluster, streams, seed)
        load = asyncio.create_task(clients.run(), name="clients")
        say(f"{streams} streams on {prefill} prefill and {decode} decode workers behind {routers} routers")
        try:
            await disturb(cluster, clients, course, count, seed, say)
        finally:
            clients.over.set()
            clients.resume()
            await load
            await look(cluster, course)
            _report(record, clients.tally, course, say)


def _report(record: Record, tally: Tally, course: Course, say: Say) -> None:
    slowest = kind_rows(record, "twostroke, reference engine", tally.gaps, course.faults)
    failed = sum(tally.failed.values())
    for reason, times in tally.failed.most_common(5):
        say(f"failed {times} times: {reason}")
    record.row(
        system="twostroke, reference engine",
        times=len(course.faults),
        requests=tally.sent,
        complete=tally.complete,
        failed=failed,
        moved_to_another_router=tally.moved,
        refused_and_asked_elsewhere=tally.refused,
        stranded_block_s=course.stranded_block_s,
    )
    record.check("requests failed", failed, "", "0", failed == 0 and tally.complete > 0)
    record.check("answers with a token lost or doubled", tally.wrong, "", "0", tally.wrong == 0)
    record.check("recovery p99", slowest, "s", "< 2", slowest is not None and slowest < 2)
    record.check(f"blocks held {QUIET_S:g} s after the end", course.held, "blocks", "0", course.held == 0)
    share = goodput(tally.moments, course.faults, course.undisturbed)
    record.check(
        "tokens per second from a fault to its end / before", share, "", ">= 0.5", share is not None and share >= 0.5
    )


async def run(engine: Engine, prefill: int, decode: int, routers: int, streams: int, count: int, seed: int) -> None:
    """The whole benchmark."""
    console = make_console()
    say = make_say(console)
    record = Record("faults", command_line("faults"))
    try:
        if engine is not Engine.VLLM:
            await reference(record, prefill, decode, routers, streams, count, seed, say)
        if engine is not Engine.REFERENCE:
            await fault_vllm.compare(record, seed, say)
    finally:
        finish(record, console)


@app.command(help=__doc__)
def main(
    faults: Annotated[int, typer.Option(min=1, help="Faults on the reference engine, one after another.")] = 200,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once, likewise.")] = 64,
    prefill: Annotated[int, typer.Option(min=1, help="Prefill workers, likewise.")] = 4,
    decode: Annotated[int, typer.Option(min=1, help="Decode workers, likewise.")] = 4,
    routers: Annotated[int, typer.Option(min=1, help="Routers, likewise.")] = 2,
    seed: Annotated[int, typer.Option(help="Of prompts and faults.")] = 1,
    engine: Annotated[Engine, typer.Option(help="Only this part.")] = Engine.ALL,
) -> None:
    """Entry point."""
    end("faults", run(engine, prefill, decode, routers, streams, faults, seed))


if __name__ == "__main__":
    app()
