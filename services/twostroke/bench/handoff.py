"""What does a hand-off cost? `python -m twostroke.bench.handoff`; writes build/bench/handoff.json.

Two pairs of workers with the same engine and model, one with our connector and one with vLLM's stock NixlConnector
(made fit to share a machine), prefill on one core and decode on another. They get the same prompts in turn, each prompt
new, so that nothing is cached. Exposed is the time from the end of prefill's last step to the beginning of decode's
first one: what of the hand-off is not hidden behind the prefill.

Then aborts at random moments, after which no block may be in use; the raw pull of scattered blocks (bench-pull); and
peers that are killed, stopped and cut off in the middle of a transfer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from statistics import median
from typing import Annotated

import typer

from twostroke.bench import handoff_faults, pull
from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.record import Record
from twostroke.bench.running import Say
from twostroke.bench.worker_pair import WorkerPair, worker_pair
from twostroke.errors import TwostrokeError
from twostroke.launch.model import obtain

OURS, STOCK = "twostroke", "nixl"
CHUNK_TOKENS = 256
LENGTHS = (1024, 4096, 7000)
ANSWER_TOKENS = 4
VOCABULARY = range(1000, 40000)
_QUIET_S = 5.0

app = make_app()


def prompt(length: int, generator: random.Random) -> list[int]:
    """Tokens that no other prompt begins with."""
    return generator.choices(VOCABULARY, k=length)


async def measure(pairs: Sequence[WorkerPair], lengths: Sequence[int], rounds: int, record: Record, say: Say) -> None:
    """Rows of all rounds, and the checks."""
    generator = random.Random(1)  # noqa: S311 not a secret
    exposed: dict[tuple[str, int], list[float]] = {}
    for pair in pairs:
        # The first hand-off of a pair makes the connection.
        await pair.ask(f"warm-{pair.connector}", prompt(300, generator), ANSWER_TOKENS)
    for number in range(rounds):
        for length in lengths:
            tokens = prompt(length, generator)
            answers = {}
            for pair in generator.sample(list(pairs), len(pairs)):
                request_id = f"{pair.connector}-{length}-{number}"
                answer = await pair.ask(request_id, tokens, ANSWER_TOKENS)
                answers[pair.connector] = answer.token_ids
                after_step_ms, after_forward_ms = pair.exposed(request_id)
                exposed.setdefault((pair.connector, length), []).append(after_step_ms)
                record.row(
                    connector=pair.connector,
                    prompt_tokens=length,
                    round=number,
                    exposed_ms=after_step_ms,
                    after_forward_ms=after_forward_ms,
                    second_token_ms=(answer.second_token_s - answer.first_token_s) * 1e3,
                )
                say(f"{pair.connector}: {length} tokens, exposed {after_step_ms:.1f} ms")
            if len({tuple(each) for each in answers.values()}) != 1:
                raise TwostrokeError(f"the connectors' answers to {length} tokens differ: {answers}")
    _check(exposed, lengths, record)


def _check(exposed: dict[tuple[str, int], list[float]], lengths: Sequence[int], record: Record) -> None:
    medians = {key: median(values) for key, values in exposed.items()}
    for length in lengths:
        ours, stock = medians.get((OURS, length)), medians.get((STOCK, length))
        ratio = ours / stock if ours is not None and stock else None
        name = f"exposed hand-off at {length} tokens, ours / stock NixlConnector's"
        record.check(name, ratio, "", "<= 0.25", ratio is not None and ratio <= 0.25)
    first, last = medians.get((OURS, lengths[0])), medians.get((OURS, lengths[-1]))
    flat = last / first if first and last is not None else None
    name = f"exposed hand-off at {lengths[-1]} tokens / at {lengths[0]}, ours"
    record.check(name, flat, "", "<= 1.5", flat is not None and flat <= 1.5)


async def aborts(pair: WorkerPair, count: int, record: Record, say: Say) -> None:
    """Ends requests at random moments of their lives; then looks for blocks that stayed in use."""
    generator = random.Random(2)  # noqa: S311 not a secret
    before = {role: (await pair.load(role)).used_blocks for role in pair.workers}
    began_s, ended = time.monotonic(), 0

    async def one(number: int) -> bool:
        tokens = prompt(generator.choice((5, 120, 300, 600)), generator)
        with suppress(TimeoutError):
            async with asyncio.timeout(generator.uniform(0.0, 1.0) ** 2 * 3):
                await pair.ask(f"abort-{number}", tokens, 40)
                return False
        return True

    for start in range(0, count, 4):
        ended += sum(await asyncio.gather(*(one(start + offset) for offset in range(min(4, count - start)))))
    say(f"{pair.connector}: {ended} of {count} requests aborted in {time.monotonic() - began_s:.0f} s")
    stranded = await _stranded(pair, before)
    record.row(connector=pair.connector, aborts=ended, stranded_blocks=stranded)
    name = f"blocks still in use {_QUIET_S:g} s after {count} requests were aborted at random, both sides"
    record.check(name, stranded, "blocks", "0", stranded == 0)


async def _stranded(pair: WorkerPair, before: dict[str, int]) -> int:
    """Blocks in use beyond those before, once there are none or the time is over."""
    deadline_s = time.monotonic() + _QUIET_S
    while True:
        loads = {role: await pair.load(role) for role in pair.workers}
        stranded = sum(load.used_blocks - before[role] + load.held_blocks for role, load in loads.items())
        if stranded == 0 or time.monotonic() > deadline_s:
            return stranded
        await asyncio.sleep(0.1)


async def run(lengths: Sequence[int], rounds: int, abort_count: int, pulls: int) -> None:
    """The whole benchmark."""
    console = make_console()
    say = make_say(console)
    record = Record("handoff", command_line("handoff"))
    model = obtain("", say)
    logs = log_folder("handoff")
    arguments = (f"--step-budget-tokens={CHUNK_TOKENS}", f"--max-model-len-tokens={max(lengths) + 64}")
    try:
        async with AsyncExitStack() as stack:
            say("starting two pairs of workers")
            pairs = [
                await stack.enter_async_context(worker_pair(connector, model, logs, say, arguments))
                for connector in (OURS, STOCK)
            ]
            lanes = await pairs[0].probe()
            say(f"{OURS}: lanes {', '.join(lanes.lanes)}, {lanes.bytes_per_s / 1e9:.1f} GB/s")
            await measure(pairs, lengths, rounds, record, say)
            if abort_count:
                await aborts(pairs[0], abort_count, record, say)
        if pulls:
            say("pulling scattered blocks")
            pulled = await asyncio.to_thread(pull.run, pulls, record.command)
            record.rows += pulled.rows
            record.checks += pulled.checks
            say("killing, stopping and cutting off peers")
            await asyncio.to_thread(handoff_faults.faults, record)
    finally:
        finish(record, console)


@app.command(help=__doc__)
def main(
    rounds: Annotated[int, typer.Option(min=1, help="Prompts per length and connector.")] = 5,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = ",".join(map(str, LENGTHS)),
    abort_count: Annotated[int, typer.Option("--aborts", min=0, help="Requests that are aborted; 0 for none.")] = 200,
    pulls: Annotated[int, typer.Option(min=0, help="Repetitions of raw pulls; 0 leaves them and the faults out.")] = 15,
) -> None:
    """Entry point."""
    end("handoff", run([int(length) for length in lengths.split(",")], rounds, abort_count, pulls))


if __name__ == "__main__":
    app()
