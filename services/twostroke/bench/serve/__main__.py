"""`python -m twostroke.bench.serve`: one pool or two, under chats, documents and both.

Every system serves the same mixes on the same cores, one system after the other, in rounds whose order rotates. First
the machine's speed is measured: times of arrival and limits are divided by it, so that every machine is asked for as
much as it can bear. Writes build/bench/serve.json and serve.html. Exit code 0 when all was measured, whatever came out;
1 when nothing could be.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import psutil
import typer
from rich.console import Console
from rich.table import Table

from twostroke.bench.command import command_line, end, log_folder, make_app, make_console, make_say
from twostroke.bench.meter import Meter, machine_s
from twostroke.bench.record import FOLDER, Record
from twostroke.bench.running import Running, Say, running
from twostroke.bench.serve import pace, report, systems
from twostroke.bench.serve.page import report as html
from twostroke.bench.serve.play import play
from twostroke.bench.serve.stats import Played
from twostroke.bench.serve.systems import System, stack
from twostroke.bench.serve.traffic import CHAT, COMMITTED, DOCUMENT, Arrival, Mixes, bodies, paced, read, shortened
from twostroke.bench.stacks import cpu_devices
from twostroke.config import child_environment
from twostroke.errors import ConfigError, UnavailableError
from twostroke.launch.devices import Devices
from twostroke.launch.model import obtain
from twostroke.measures import SloLimits, parse_slo

app = make_app()

MIXES = ("chat", "documents", "mixed", "streams")
QUICK_SECONDS, QUICK_DOCUMENT_TOKENS = 20.0, 2048

# Both servers behind a round robin compute, and every path of a P/D system is taken, before anything is measured.
_WARM_UP = tuple(Arrival(at_s, CHAT, 40, 16) for at_s in (0.0, 0.1, 0.2, 0.3)) + tuple(
    Arrival(at_s, DOCUMENT, 600, 4) for at_s in (1.0, 1.1)
)
# vLLM's workers go on spinning for a second after their last step; nobody else's measurement shall pay for that.
_SETTLE_S = 1.5


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure."""

    rounds: int
    mixes: Mixes
    systems: Sequence[System]
    slos: Mapping[str, SloLimits]
    """By kind of request."""
    speed: float = 1.0
    """By which times and limits were divided already."""

    def at(self, speed: float) -> Options:
        """The same on a machine that is so many times as fast."""
        mixes = {mix: paced(arrivals, speed) for mix, arrivals in self.mixes.items()}
        slos = {kind: slo.faster(speed) for kind, slo in self.slos.items()}
        return replace(self, mixes=mixes, slos=slos, speed=self.speed * speed)


@dataclass(slots=True)
class Results:
    """What came out."""

    played: list[Played] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    """Of each system, its greedy answer to the same prompt."""
    lost: list[str] = field(default_factory=list)
    """What broke off, and why."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where systems are started. model: folder."""

    model: str
    devices: Devices
    environment: Mapping[str, str]


async def measure(place: Place, options: Options, results: Results, say: Say) -> None:
    """All rounds. A system that breaks off loses its turn, no other's. Cancellation takes everything down; results has
    what was measured until then."""
    for number in range(options.rounds):
        turn = number % len(options.systems)
        for system in [*options.systems[turn:], *options.systems[:turn]]:
            try:
                await _turn(place, system, number, options, results, say)
            except UnavailableError as error:
                results.lost.append(f"round {number + 1}, {system.label}: {error.message}")
                say(results.lost[-1])


async def _turn(place: Place, system: System, number: int, options: Options, results: Results, say: Say) -> None:
    made = stack(system, place.model, place.devices, place.environment, options.slos)
    say(f"round {number + 1}/{options.rounds}: starting {system.label}")
    async with running([made], log_folder(f"serve/{system.label}-{number + 1}"), say) as started:
        ((served, answer),) = started
        results.texts[system.label] = answer.text()
        warm = await play(made.address, _WARM_UP, bodies(_WARM_UP, "warm-up"), lambda: None)
        if broken := [each.error for each in warm if each.error]:
            raise UnavailableError(f"warm-up: {broken[0]}")
        for mix, arrivals in options.mixes.items():
            await asyncio.sleep(_SETTLE_S)
            played = await _play(served, mix, arrivals, number)
            results.played.append(played)
            say(_line(played))


async def _play(served: Running, mix: str, arrivals: Sequence[Arrival], number: int) -> Played:
    served.check_alive()
    asked = bodies(arrivals, f"{mix} {number}")
    meter = Meter({**served.groups(), "client": [psutil.Process().pid]})
    before_s = machine_s()
    seen = await play(served.stack.address, arrivals, asked, meter.start)
    all_s, used_s = machine_s() - before_s, meter.used_s()
    served.check_alive()
    client_s = used_s.pop("client")
    own_s = sum(used_s.values())
    return Played(served.stack.name, mix, number, tuple(seen), own_s, client_s, max(0.0, all_s - own_s - client_s))


def _line(played: Played) -> str:
    failed = [each.error for each in played.seen if each.error]
    last_s = max((each.tokens_s[-1] for each in played.seen if each.tokens_s), default=0.0)
    parts = f"{len(played.seen) - len(failed)} answers within {last_s:.1f} s, "
    parts += f"CPU {played.cpu_s:.1f} s, of others {played.other_cpu_s:.1f} s"
    return f"  {played.system:<12} {played.mix:<10} {parts}" + (
        f"; {len(failed)} failed: {failed[0]}" if failed else ""
    )


def _print(made: report.Numbers, record: Record, console: Console) -> None:
    for each in report.tables(made):
        table = Table(title=each.title, title_justify="left")
        for index, column in enumerate(each.columns):
            table.add_column(column, justify="right" if index > 1 else "left", no_wrap=index < 2)
        for row in each.rows:
            table.add_row(*row)
        console.print(table)
    Record(record.name, record.command, checks=record.checks).print(console)


async def compare(options: Options, speed: float | None) -> None:
    """The whole benchmark. speed: of this machine; None measures it. Cancellation takes everything down, and writes
    what was measured."""
    console = make_console()
    say = make_say(console)
    environment = child_environment()
    found = cpu_devices(environment)
    place = Place(obtain("", say), found, environment)
    for system in options.systems:
        # A flag that is none shows before the first minute has passed.
        stack(system, place.model, found, environment, options.slos)
    if speed is None:
        one = stack(systems.chosen([systems.ONE], ())[0], place.model, found, environment, options.slos)
        speed = await pace.speed(one, say)
    options = options.at(speed)
    record = Record("serve", command_line("serve"))
    results = Results()
    try:
        await measure(place, options, results, say)
    except asyncio.CancelledError:
        results.lost.append("it was interrupted")
        if results.played:
            _write(record, options, results, console, say)
        raise
    if not results.played:
        raise UnavailableError(results.lost[0])
    _write(record, options, results, console, say)


def _write(record: Record, options: Options, results: Results, console: Console, say: Say) -> None:
    made = report.numbers(results.played, options.slos)
    keys = [(each.mix, each.system) for each in results.played]
    report.rows(record, made, options.slos, {key: keys.count(key) for key in keys}, options.speed)
    report.checks(record, made, options.systems)
    report.validity(record, made, results.texts, results.lost)
    page = FOLDER / "serve.html"
    path = record.write()
    page.write_text(html(record, made, results.played, options.slos), encoding="utf-8")
    _print(made, record, console)
    say(f"written to {path} and {page}")


def _mixes(path: Path, names: Sequence[str], quick: bool) -> Mixes:
    mixes = read(path)
    unknown = [name for name in names if name not in mixes]
    if unknown:
        raise ConfigError(f"--mixes {','.join(unknown)}: {path} has {','.join(mixes)}")
    chosen = {name: mixes[name] for name in names}
    if not quick:
        return chosen
    return {name: shortened(each, QUICK_SECONDS, QUICK_DOCUMENT_TOKENS) for name, each in chosen.items()}


def _speed(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise ConfigError(f"--speed {text}: write auto, or a number such as 2.5")
    return found


def _sizes(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise typer.BadParameter("write numbers of at least 1, separated by commas")
    return [int(part) for part in parts]


@app.command(help=__doc__)
def main(
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds; every system is started in each.")] = 3,
    mixes: Annotated[str, typer.Option(metavar="LIST", help="Of the arrivals' mixes.")] = ",".join(MIXES),
    names: Annotated[str, typer.Option("--systems", metavar="LIST", help="Systems to compare.")] = ",".join(
        systems.NAMES
    ),
    chunks: Annotated[
        str, typer.Option(metavar="LIST", help="Chunk sizes of the system 'chunked'; the best of several is compared.")
    ] = "128",
    arrivals: Annotated[Path, typer.Option(metavar="FILE", help="What is asked, and when.")] = COMMITTED,
    chat_slo: Annotated[str, typer.Option(metavar="SLO", help="Limits of chats, at speed 1.")] = "ttft=1.5s,itl=200ms",
    document_slo: Annotated[
        str, typer.Option(metavar="SLO", help="Limits of documents, at speed 1.")
    ] = "ttft=20s,tpot=500ms",
    speed: Annotated[
        str, typer.Option(metavar="auto|N", help="How many times as fast as the reference the machine is.")
    ] = "auto",
    quick: Annotated[
        bool, typer.Option("--quick", help="One round of short mixes, documents of at most 2,048 tokens.")
    ] = False,
) -> None:
    """See the module."""

    async def work() -> None:
        slos = {CHAT: parse_slo(chat_slo), DOCUMENT: parse_slo(document_slo)}
        chosen = systems.chosen(names.split(","), _sizes(chunks))
        found = Options(1 if quick else rounds, _mixes(arrivals, mixes.split(","), quick), chosen, slos)
        await compare(found, _speed(speed))

    end("serve", work())


if __name__ == "__main__":
    app()
