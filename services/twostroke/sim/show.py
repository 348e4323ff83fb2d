"""Prints results: tables for people, JSON for programs."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from twostroke.sim.summary import Spread, Summary


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    if math.isnan(value):
        return "-"
    if value >= 100:
        return f"{value:,.0f} s"
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms"


def line(console: Console, text: str, style: str = "") -> None:
    """One line as it is."""
    console.print(Text(text, style=style), soft_wrap=True, highlight=False)


def summary_tables(console: Console, found: Summary) -> None:
    """Times, shares and costs of one run."""
    times = Table(title="times", title_justify="left")
    for name in ("", "mean", "p50", "p90", "p99", "p99.9", "max"):
        times.add_column(name, justify="left" if not name else "right")
    spreads: Sequence[tuple[str, Spread]] = (
        ("TTFT, per request", found.ttft),
        ("ITL, per gap", found.itl),
        ("TPOT, per request", found.tpot),
        ("end to end", found.e2e),
    )
    for name, each in spreads:
        values = (each.mean, each.p50, each.p90, each.p99, each.p999, each.largest)
        times.add_row(name, *(seconds(value) for value in values))
    console.print(times)
    parts = "  ".join(f"{name} {seconds(value)}" for name, value in found.parts_s.items())
    lines = (
        f"requests       {found.requests:,}: {found.finished:,} finished, {found.refused:,} refused, "
        f"{found.failed:,} failed, {found.unfinished:,} unfinished, in {found.duration_s:,.0f} s",
        f"mean parts     {parts}",
        f"SLO attainment {found.attainment:.1%}   goodput {found.goodput:.3g}/s, "
        f"{found.goodput_per_gpu:.3g}/s per GPU, {found.goodput_per_dollar:,.0f} per dollar",
        f"stall share    {found.stall_share:.2%}   output {found.tokens_per_s:,.0f} tokens/s",
        f"cost           {found.gpu_hours:,.1f} GPU hours, {found.dollars:,.2f} dollars",
        f"hand-offs      {found.handoffs:,}, {found.handoff_bytes / 1e9:,.0f} GB   preemptions {found.preemptions:,}   "
        f"prompt tokens found in a prefix cache {found.cached_share:.1%}",
    )
    for text in lines:
        line(console, text)


def write_json(path: Path, content: object) -> None:
    """Writes a file for programs."""
    path.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")


def progress(console: Console, total: int) -> Callable[[float, int], None]:
    """A line now and then on a long run: virtual time and finished requests."""
    started_s = last_s = time.monotonic()

    def show(now_s: float, finished: int) -> None:
        nonlocal last_s
        at_s = time.monotonic()
        if at_s - last_s >= 2:
            last_s = at_s
            done = f"{finished / total:.0%} of {total:,} requests" if total else f"{finished:,} requests"
            line(console, f"[{at_s - started_s:6.1f} s] {done}, {now_s:,.0f} s of virtual time", "dim")

    return show
