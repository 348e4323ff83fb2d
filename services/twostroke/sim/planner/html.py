"""The planner's report as one HTML file: no script, no external host, plots as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from twostroke.sim.planner.search import Candidate, Found, Question
from twostroke.sim.planner.verdict import Verdict
from twostroke.sim.planner.words import COLUMNS, cells, flips, headline, listed

_WIDTH, _HEIGHT, _PAD = 520, 300, 52
_TWO, _ONE = "#0b6e99", "#c0504d"
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { padding: 3px 8px; border-bottom: 1px solid #ddd }
td:not(:first-child), th:not(:first-child) { text-align: right; white-space: nowrap }
.plots { display: flex; flex-wrap: wrap; gap: 1em } svg { border: 1px solid #ddd } .wide { overflow-x: auto }
"""


def report(question: Question, found: Found, verdict: Verdict, command: str) -> str:
    """The whole page."""
    head, *rest = headline(verdict, question)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in cells(each)) + "</tr>"
        for each in listed(found, verdict, 30)
    )
    columns = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
    changes = "".join(f"<li>{escape(text)}</li>" for text in flips(verdict))
    slo = question.slo
    plots = [
        _scatter(
            found.candidates, "cost and goodput", ("dollars per hour", "goodput, requests/s"),
            lambda each: (each.config.dollars_per_hour, each.found.goodput),
        ),
        _scatter(
            found.candidates, "the two latencies", ("TTFT p99, s", "ITL p99, ms"),
            lambda each: (each.found.ttft.p99, each.found.itl.p99 * 1e3),
            (slo.ttft_s, slo.itl_s * 1e3),
        ),
        *(_bars(name, each) for name, each in (("two pools", verdict.two), ("one pool", verdict.one)) if each),
    ]  # fmt: skip
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>twostroke plan</title>'
        f"<style>{_STYLE}</style></head><body><h1>{escape(head)}</h1>"
        + "".join(f"<p>{escape(text)}</p>" for text in rest)
        + (f"<h2>What would change the answer</h2><ul>{changes}</ul>" if changes else "")
        + f'<h2>Simulated fleets</h2><div class="plots">{"".join(plots)}</div>'
        + f'<div class="wide"><table><tr>{columns}</tr>{rows}</table></div>'
        + f"<p>{found.screened:,} configurations screened, {len(found.candidates)} simulated, "
        + f"{len(question.traffic):,} requests ({escape(question.traffic.name)}). "
        + f"Made by <code>{escape(command)}</code>.</p></body></html>\n"
    )


def _scatter(
    candidates: Sequence[Candidate],
    title: str,
    axes: tuple[str, str],
    place: Callable[[Candidate], tuple[float, float]],
    limits: tuple[float, float] = (0.0, 0.0),
) -> str:
    points = [(each, *place(each)) for each in candidates]
    points = [point for point in points if math.isfinite(point[1]) and math.isfinite(point[2])]
    right = _nice(max((x for _, x, _ in points), default=1.0))
    top = _nice(max((y for _, _, y in points), default=1.0))

    def at(x: float, y: float) -> tuple[float, float]:
        return _PAD + x / right * (_WIDTH - 2 * _PAD), _HEIGHT - _PAD - y / top * (_HEIGHT - 2 * _PAD)

    marks = []
    for each, x, y in points:
        cx, cy = at(x, y)
        color = _TWO if each.config.two_pools else _ONE
        marks.append(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{color}" fill-opacity="0.6">'
            f"<title>{escape(each.config.text())}: {x:.3g}, {y:.3g}</title></circle>"
        )
    x_limit, y_limit = limits
    if 0 < x_limit <= right:
        px, _ = at(x_limit, 0)
        marks.append(f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{_PAD}" y2="{_HEIGHT - _PAD}" {_DASH}/>')
    if 0 < y_limit <= top:
        _, py = at(0, y_limit)
        marks.append(f'<line x1="{_PAD}" x2="{_WIDTH - _PAD}" y1="{py:.1f}" y2="{py:.1f}" {_DASH}/>')
    legend = (
        f'<text x="{_WIDTH - 150}" y="20" font-size="12" fill="{_TWO}">● two pools</text>'
        f'<text x="{_WIDTH - 70}" y="20" font-size="12" fill="{_ONE}">● one pool</text>'
    )
    return _frame(title, axes, right, top, "".join(marks) + legend)


_DASH = 'stroke="#666" stroke-dasharray="5 4"'


def _bars(title: str, each: Candidate) -> str:
    """Where a mean request's time goes."""
    parts = each.found.parts_s
    longest = _nice(max(parts.values(), default=1.0))
    bars = []
    for index, (name, value) in enumerate(parts.items()):
        y = _PAD + index * 36
        width = value / longest * (_WIDTH - 2 * _PAD - 90)
        color = _TWO if each.config.two_pools else _ONE
        bars.append(
            f'<text x="12" y="{y + 15}" font-size="12">{escape(name)}</text>'
            f'<rect x="110" y="{y}" width="{width:.1f}" height="20" fill="{color}" fill-opacity="0.7"/>'
            f'<text x="{116 + width:.1f}" y="{y + 15}" font-size="12">{value * 1e3:,.0f} ms</text>'
        )
    head = f'<text x="12" y="22" font-size="14">mean time of a request, {escape(title)}</text>'
    return f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img">{head}{"".join(bars)}</svg>'


def _frame(title: str, axes: tuple[str, str], right: float, top: float, inside: str) -> str:
    left, bottom = _PAD, _HEIGHT - _PAD
    ticks = []
    for step in range(5):
        x = left + step / 4 * (_WIDTH - 2 * _PAD)
        y = bottom - step / 4 * (_HEIGHT - 2 * _PAD)
        ticks.append(
            f'<text x="{x:.0f}" y="{bottom + 16}" font-size="11" text-anchor="middle">{right * step / 4:.3g}</text>'
            f'<text x="{left - 6}" y="{y + 4:.0f}" font-size="11" text-anchor="end">{top * step / 4:.3g}</text>'
        )
    return (
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img"><text x="12" y="20" font-size="14">{escape(title)}</text>'
        f'<path d="M{left},{_PAD} V{bottom} H{_WIDTH - _PAD}" fill="none" stroke="#222"/>{"".join(ticks)}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 12}" font-size="12" text-anchor="middle">{escape(axes[0])}</text>'
        f'<text x="12" y="{_PAD - 12}" font-size="12">{escape(axes[1])}</text>{inside}</svg>'
    )


def _nice(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10, 20) if step * power >= value)
