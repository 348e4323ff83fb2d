"""The table of `twostroke claims`."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from twostroke.sim.perf.claims import Laboratory, claims
from twostroke.sim.perf.claims_prompt import Claim

_WIDTH = 190


def run(seconds: float) -> None:
    """Simulates and prints. seconds: of arrivals in each experiment."""
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
