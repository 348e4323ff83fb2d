"""The planner's report as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from twostroke.sim.planner.search import Candidate, Found, Question
from twostroke.sim.planner.verdict import Verdict
from twostroke.sim.planner.words import COLUMNS, cells, flips, headline, listed
from twostroke.sim.plots import WIDTH, Axis, Bar, Plot, bars, nice, page, table

_TWO, _ONE = "#0b6e99", "#c0504d"


def report(question: Question, found: Found, verdict: Verdict, command: str) -> str:
    """The whole page."""
    head, *rest = headline(verdict, question)
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
        *(_parts(name, each) for name, each in (("two pools", verdict.two), ("one pool", verdict.one)) if each),
    ]  # fmt: skip
    return page(
        "twostroke plan",
        f"<h1>{escape(head)}</h1>"
        + "".join(f"<p>{escape(text)}</p>" for text in rest)
        + (f"<h2>What would change the answer</h2><ul>{changes}</ul>" if changes else "")
        + f'<h2>Simulated fleets</h2><div class="plots">{"".join(plots)}</div>'
        + table(COLUMNS, (cells(each) for each in listed(found, verdict, 30)))
        + f"<p>{found.screened:,} configurations screened, {len(found.candidates)} simulated, "
        + f"{len(question.traffic):,} requests ({escape(question.traffic.name)}). "
        + f"Made by <code>{escape(command)}</code>.</p>",
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
    plot = Plot(
        title,
        Axis(axes[0], nice(max((x for _, x, _ in points), default=1.0))),
        Axis(axes[1], nice(max((y for _, _, y in points), default=1.0))),
    )
    marks = []
    for each, x, y in points:
        cx, cy = plot.at(x, y)
        marks.append(
            f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="4" fill="{_color(each)}" fill-opacity="0.6">'
            f"<title>{escape(each.config.text())}: {x:.3g}, {y:.3g}</title></circle>"
        )
    legend = (
        f'<text x="{WIDTH - 150}" y="20" font-size="12" fill="{_TWO}">● two pools</text>'
        f'<text x="{WIDTH - 70}" y="20" font-size="12" fill="{_ONE}">● one pool</text>'
    )
    return plot.draw("".join(marks) + plot.limits(*limits) + legend)


def _parts(title: str, each: Candidate) -> str:
    """Where a mean request's time goes."""
    entries = [Bar(name, value, f"{value * 1e3:,.0f} ms", _color(each)) for name, value in each.found.parts_s.items()]
    return bars(f"mean time of a request, {title}", entries)


def _color(each: Candidate) -> str:
    return _TWO if each.config.two_pools else _ONE
