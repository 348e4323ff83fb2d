"""`python -m twostroke.bench.parity`: whether two pools answer as one engine does, and how soon.

Asks a plain vLLM API server and two pools the whole table, compares every field, and measures the time to the first
token of both in turns. Writes build/bench/parity.json. Exit code 0 when all was asked, whatever came out; 1 when
something could not be.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from twostroke.bench.command import command_line, end, finish, log_folder, make_app, make_console, make_say
from twostroke.bench.parity import ttft
from twostroke.bench.parity.adapter import write_adapter
from twostroke.bench.parity.row import Row
from twostroke.bench.parity.run import Address, Outcome, ask_all, details, vocabulary
from twostroke.bench.parity.systems import KV_BYTES, systems, with_adapters_and_reasoning
from twostroke.bench.parity.table import rows, second_rows
from twostroke.bench.parity.table_lora import ADAPTERS
from twostroke.bench.record import FOLDER, Record
from twostroke.bench.running import Say, running
from twostroke.bench.stacks import Served, cpu_devices
from twostroke.config import child_environment
from twostroke.launch.model import obtain

app = make_app()

_MAX_MODEL_LEN_TOKENS = 4224
_SECOND_LEN_TOKENS = 1024
_LENGTHS = (512, 4096)


async def compare(wanted: str, rounds: Sequence[int]) -> None:
    """The whole comparison. Cancellation takes everything down and writes nothing."""
    console = make_console()
    say = make_say(console)
    environment = child_environment()
    found = cpu_devices(environment)
    model = obtain("", say)
    record = Record("parity", command_line("parity"))
    served, logs = Served(model, KV_BYTES, _MAX_MODEL_LEN_TOKENS), log_folder("parity")
    adapters = {
        name: write_adapter((FOLDER / "adapters" / name).absolute(), Path(model), seed)
        for seed, name in enumerate(ADAPTERS)
    }
    say(f"starting one engine and two pools (logs in {logs})")
    async with running(systems(served, found, environment), logs, say) as started:
        addresses = [each.stack.address for each, _ in started]
        times = {
            tokens: await ttft.measure(addresses, tokens, count, say) if count else None
            for tokens, count in zip(_LENGTHS, rounds, strict=True)
        }
        outcomes = await _ask(rows(vocabulary(Path(model))), wanted, addresses, say)
    say("starting both again, with adapters and a reasoning parser")
    served = Served(model, KV_BYTES, _SECOND_LEN_TOKENS)
    second = systems(served, found, environment, with_adapters_and_reasoning(adapters))
    async with running(second, logs, say) as started:
        addresses = [each.stack.address for each, _ in started]
        outcomes += await _ask(second_rows(_SECOND_LEN_TOKENS), wanted, addresses, say)
    _judge(record, outcomes)
    for tokens, timed in times.items():
        _time(record, timed, tokens)
    finish(record, console)


async def _ask(table: Sequence[Row], wanted: str, addresses: Sequence[Address], say: Say) -> list[Outcome]:
    one, two = addresses
    return await ask_all([row for row in table if wanted in row.name], one, two, say)


def _judge(record: Record, outcomes: Sequence[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if outcome.problems]
    for outcome in outcomes:
        row = outcome.row
        record.row(
            row=row.name,
            route=row.path,
            mode="seeded" if row.seeded else "greedy",
            result=outcome.result,
            tokens=outcome.tokens,
            logprob_gap=outcome.logprob_gap,
            why="; ".join(outcome.problems)[:300],
        )
    asked = [outcome for outcome in outcomes if not outcome.row.refused]
    for mode in ("greedy", "seeded"):
        of_mode = [outcome for outcome in asked if outcome.row.seeded == (mode == "seeded")]
        equal = sum(not outcome.problems for outcome in of_mode)
        record.check(
            f"rows equal in {mode} mode",
            100 * equal / len(of_mode) if of_mode else None,
            "%",
            f"100 % of {len(of_mode)} rows",
            equal == len(of_mode),
        )
    refused = [outcome for outcome in outcomes if outcome.row.refused]
    record.check(
        "rows that cannot be equal and are refused with a clear error",
        sum(not outcome.problems for outcome in refused) if refused else None,
        "rows",
        f"{len(refused)} of {len(refused)}",
        not any(outcome.problems for outcome in refused),
    )
    (FOLDER / "parity-differences.json").write_text(json.dumps([details(outcome) for outcome in wrong], indent=1))


def _time(record: Record, timed: ttft.Timed | None, tokens: int) -> None:
    if timed is not None:
        for name, times_ms in (("one engine", timed.one_ms), ("two pools", timed.two_ms)):
            record.row(
                row=f"time to first token, {tokens} tokens, {name}",
                ttft_ms=timed.medians_ms[name != "one engine"],
                ttft_ms_low=min(times_ms),
                ttft_ms_high=max(times_ms),
                rounds=len(times_ms),
            )
    one_ms, two_ms = timed.medians_ms if timed else (0.0, None)
    goal = f"<= {ttft.GOAL_FACTOR:g} times that of one engine plus {ttft.GOAL_MS:g} ms"
    record.check(
        f"time to first token through two pools ({tokens} tokens, one core for prefill each, idle)",
        two_ms,
        "ms",
        f"{goal}: {timed.allowed_ms:.0f} ms after {one_ms:.0f} ms" if timed else goal,
        bool(timed and timed.medians_ms[1] <= timed.allowed_ms),
    )


@app.command()
def main(
    wanted: Annotated[str, typer.Option("--rows", metavar="TEXT", help="Only rows with this in their name.")] = "",
    rounds: Annotated[int, typer.Option(min=0, metavar="N", help="Times of a 512 token prompt on each system.")] = 7,
    rounds_4k: Annotated[int, typer.Option(min=0, metavar="N", help="The same of 4,096 tokens.")] = 3,
) -> None:
    """Compares two pools with one engine, field by field; writes build/bench/parity.json."""
    end("parity", compare(wanted, (rounds, rounds_4k)))


if __name__ == "__main__":
    app()
