"""The table of `twostroke claims`."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from twostroke.sim.perf.claims import Claim, Laboratory, claims

_WIDTH = 190


def run(
    seconds: Annotated[
        float, typer.Option(min=30, metavar="SECONDS", help="Simulated arrivals of each experiment.")
    ] = 300,
) -> None:
    """Checks the numbers that are told about two pools: simulates each against one pool, untuned and tuned.

    Takes about a minute or two. The models are those of the catalogue on hardware sheets, with fitted efficiencies.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    console.print(table(claims(Laboratory(seconds))))


def table(lines: list[Claim]) -> Table:
    """For the terminal."""
    made = Table(title="claims about two pools, simulated", title_justify="left")
    for name in (
        "claim",
        "set-up",
        "one pool, untuned",
        "one pool, tuned",
        "two pools",
        "verdict",
        "smallest hardware",
    ):
        made.add_column(name, justify="right" if "pool" in name else "left")
    for line in lines:
        figures = (_figure(value, line.unit) for value in (line.untuned, line.tuned, line.two_pools))
        made.add_row(line.words, line.setup, *figures, line.verdict, line.smallest)
    return made


def _figure(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    return "overloaded" if math.isinf(value) else f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
