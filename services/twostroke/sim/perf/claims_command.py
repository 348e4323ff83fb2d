"""The table of `twostroke claims`."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table

from twostroke.sim.perf.claims import RATE_STEPS, TUNED, Laboratory, claims
from twostroke.sim.perf.claims_prompt import UNTUNED, Claim
from twostroke.sim.show import line

_WIDTH = 190


def run(seconds: float) -> None:
    """Simulates and prints. seconds: of arrivals in each experiment."""
    console = Console()
    console = console if console.is_terminal else Console(width=_WIDTH)
    line(console, "some hundred simulations, a minute or two", "dim")
    console.print(table(claims(Laboratory(seconds))))


def table(lines: list[Claim]) -> Table:
    """For the terminal."""
    budgets = ", ".join(map(str, TUNED))
    made = Table(
        title="claims about two pools, simulated",
        title_justify="left",
        caption="All columns of a line have the same GPUs and the same requests. Untuned: a step budget of "
        f"{UNTUNED} tokens. Tuned: the best of {budgets} for that line, unless it says otherwise. 2P1D: two prefill "
        f"workers and one decode worker. 0 req/s: less than a {2**RATE_STEPS}th of the most that was tried.",
        caption_justify="left",
    )
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
    for each in lines:
        figures = (_figure(value, each.unit) for value in (each.untuned, each.tuned, each.two_pools))
        made.add_row(each.words, each.setup, *figures, each.verdict, each.smallest)
    return made


def _figure(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    return "overloaded" if math.isinf(value) else f"{value:,.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
