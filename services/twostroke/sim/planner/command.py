"""`twostroke plan`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from twostroke.measures import SloLimits
from twostroke.sim.planner import html, values, words
from twostroke.sim.planner.errors import Interval
from twostroke.sim.planner.search import Lab, Question, search, so_far
from twostroke.sim.planner.space import Space
from twostroke.sim.planner.verdict import judge
from twostroke.sim.scenario import FleetSpec, TrafficSpec
from twostroke.sim.show import line, write_json

_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class PlanFlags:
    """What to plan. prefill, decode: how wrong predicted times may be. requests: of a simulation, at most.

    folder: for the report and the values of the chosen fleet; None writes nothing.
    """

    space: Space
    traffic: TrafficSpec
    slo: SloLimits
    links: FleetSpec
    target: float
    prefill: Interval
    decode: Interval
    simulated: int
    requests: int
    with_flips: bool
    folder: Path | None
    json_file: Path | None
    command: str


def plan(flags: PlanFlags, console: Console | None = None) -> int:
    """Searches, judges, prints. Ctrl-C prints the fleets simulated so far. Raises ConfigError."""
    console = console or Console(width=None if Console().is_terminal else 240)
    traffic = flags.traffic.make()
    question = Question(traffic, flags.slo, flags.links, flags.target)
    started_s = time.monotonic()
    told_s = started_s
    done = 0

    def say(text: str) -> None:
        line(console, f"[{time.monotonic() - started_s:6.1f} s] {text}", "dim")

    def count() -> None:
        nonlocal done, told_s
        done += 1
        if time.monotonic() - told_s >= 5:
            told_s = time.monotonic()
            say(f"{done} simulations")

    say(f"{len(traffic):,} requests ({traffic.name}), SLO {flags.slo.text()} for {flags.target:.0%} of them")
    lab = Lab(question, done=count)
    try:
        with lab.open():
            found = search(lab, flags.space, flags.simulated, say, flags.requests)
            say("the best of both shapes: how much load each holds, for all step times that may be true")
            if flags.with_flips:
                say("after that: what would turn the answer round (--no-flips leaves it out)")
            verdict = judge(
                lab, found, flags.prefill, flags.decode,
                most=min(flags.requests, 1000), with_flips=flags.with_flips,
            )  # fmt: skip
    except KeyboardInterrupt:
        line(console, f"Interrupted after {done} simulations; nothing was decided. So far:", "yellow")
        words.show_table(console, so_far(lab).candidates[:10])
        return _INTERRUPTED
    words.show(console, question, found, verdict)
    if flags.json_file is not None:
        write_json(flags.json_file, words.plain(question, found, verdict))
        line(console, f"Written to {flags.json_file}")
    if flags.folder is not None:
        paths = values.write(flags.folder, verdict.chosen.config)
        page = flags.folder / "plan.html"
        page.write_text(html.report(question, found, verdict, flags.command))
        line(console, "Written to " + ", ".join(str(path) for path in [page, *paths]))
    return 0
