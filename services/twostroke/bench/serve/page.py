"""The comparison as one HTML file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import numpy as np

from twostroke.bench.record import Check, Record
from twostroke.bench.serve.report import Numbers, known, tables
from twostroke.bench.serve.stats import ALL, Played, gaps_during_prefill
from twostroke.bench.serve.traffic import CHAT, DOCUMENT
from twostroke.measures import SloLimits
from twostroke.sim.plots import PAD, Axis, Bar, Plot, bars, nice, page, table

_COLORS = ("#c0504d", "#e08e45", "#8a6d3b", "#6b6b6b", "#5aa0c8", "#0b6e99")
_STRIP_WIDTH, _STRIP_ROW, _STRIP_LEFT = 1070, 6, 12
_POINTS = 200
_LEGEND_LETTER, _LEGEND_GAP = 7, 18


def report(record: Record, made: Numbers, played: Sequence[Played], slos: Mapping[str, SloLimits]) -> str:
    """The whole page."""
    colors = _colors(played)
    limits = "; ".join(f"{kind}: {slo.text()}" for kind, slo in slos.items())
    body = [
        "<h1>Serving on two cores: one pool or two</h1>",
        f"<p>Goodput counts requests within their limits ({escape(limits)}). Medians over the rounds; made by "
        f"<code>{escape(record.command)}</code>, {record.started:%Y-%m-%d %H:%M} UTC. Words as in docs/metrics.md.</p>",
        "<h2>What is expected</h2>",
        table(("check", "value", "goal", "ok"), map(_check, record.checks)),
    ]
    for shown in tables(made):
        mix = shown.title
        mine = [each for each in played if each.mix == mix]
        body += [
            f"<h2>{escape(mix)}</h2>",
            f'<div class="plots">{"".join(_plots(mix, made, mine, slos, colors))}</div>',
            table(shown.columns, shown.rows),
            "<h3>What every client saw</h3><p>First round, one line per request: thin while it waits for its first "
            "token, a mark for each token. Documents are red.</p>",
            *_strips(mine),
        ]
    return page("twostroke bench-serve", "".join(body))


def _check(check: Check) -> tuple[str, str, str, str]:
    value = "not measured" if check.value is None else f"{check.value:.3g} {check.unit}".strip()
    return check.name, value, check.goal, "yes" if check.ok else "NO"


def _colors(played: Sequence[Played]) -> dict[str, str]:
    names = dict.fromkeys(each.system for each in played)
    return {name: _COLORS[index % len(_COLORS)] for index, name in enumerate(names)}


def _plots(
    mix: str, made: Numbers, played: Sequence[Played], slos: Mapping[str, SloLimits], colors: Mapping[str, str]
) -> Iterator[str]:
    yield _bars("goodput, requests/s", made[mix], ALL, "goodput", colors)
    kinds = [kind for kind in (CHAT, DOCUMENT) if any(kind in parts for parts in made[mix].values())]
    for kind in kinds:
        share, key = ("p99", "ttft_p99_s") if kind == CHAT else ("p50", "ttft_p50_s")
        yield _bars(f"TTFT {share} of {kind}s, s", made[mix], kind, key, colors)
    if CHAT in kinds:
        mixed = DOCUMENT in kinds
        title = f"gaps of chats{' while documents are read' if mixed else ''}: share that is longer"
        gaps = {name: _gaps(played, name, mixed) for name in colors}
        yield _tails(title, {name: each for name, each in gaps.items() if each}, slos[CHAT].itl_s, colors)


def _gaps(played: Sequence[Played], system: str, mixed: bool) -> list[float]:
    """Of chats, all rounds together; only those beside a prefill where there are documents."""
    mine = [each for each in played if each.system == system]
    if mixed:
        return [gap for each in mine for gap in gaps_during_prefill(each.seen)]
    return [gap for each in mine for seen in each.seen for gap in seen.gaps_s]


def _bars(
    title: str, by: Mapping[str, Mapping[str, Mapping[str, float]]], part: str, key: str, colors: Mapping[str, str]
) -> str:
    values = {name: parts.get(part, {}).get(key, math.nan) for name, parts in by.items()}
    return bars(title, [Bar(name, value, known(value), colors[name]) for name, value in values.items()])


def _tails(title: str, gaps: Mapping[str, Sequence[float]], limit_s: float, colors: Mapping[str, str]) -> str:
    """Share of gaps that are longer, over their length in milliseconds, both logarithmic."""
    longest_ms = nice(max((max(each) for each in gaps.values()), default=1.0) * 1e3)
    plot = Plot(title, Axis("gap, ms", longest_ms, 10.0, log=True), Axis("", 1.0, 1e-3, log=True))
    drawn, at_x = [], float(PAD)
    for name, each in gaps.items():
        sizes = np.sort(np.array(each)) * 1e3
        kept = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _POINTS)).astype(int))
        points = [plot.at(float(sizes[index]), 1 - (index + 1) / len(sizes) or 1e-3) for index in kept]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colors[name]}" stroke-width="2"/>')
        drawn.append(f'<text x="{at_x:.0f}" y="38" font-size="12" fill="{colors[name]}">{escape(name)}</text>')
        at_x += _LEGEND_LETTER * len(name) + _LEGEND_GAP
    return plot.draw("".join(drawn) + plot.limits(x=limit_s * 1e3))


def _strips(played: Sequence[Played]) -> Iterator[str]:
    first = [each for each in played if each.round == min(other.round for other in played)]
    end_s = max((at_s for each in first for seen in each.seen for at_s in seen.tokens_s), default=1.0)
    for each in first:
        yield _strip(each, end_s)


def _strip(played: Played, end_s: float) -> str:
    height = 26 + _STRIP_ROW * (len(played.seen) + 1)

    def x(at_s: float) -> float:
        return _STRIP_LEFT + at_s / end_s * (_STRIP_WIDTH - 2 * _STRIP_LEFT)

    lines = []
    for row, seen in enumerate(played.seen):
        y = 26 + row * _STRIP_ROW
        color = "#c0504d" if seen.arrival.kind == DOCUMENT else "#0b6e99"
        waited = x(seen.tokens_s[0]) if seen.tokens_s else x(end_s)
        marks = " ".join(f"M{x(at_s):.1f},{y - 2}v4" for at_s in seen.tokens_s)
        lines.append(
            f'<path d="M{x(seen.sent_s):.1f},{y}H{waited:.1f}" stroke="{color}" stroke-opacity="0.35"/>'
            f'<path d="{marks}" stroke="{color}" stroke-width="0.7"/>'
        )
    title = f"{played.system}, {end_s:.0f} s"
    return (
        f'<svg width="{_STRIP_WIDTH}" height="{height}" role="img">'
        f'<text x="12" y="16" font-size="12">{escape(title)}</text>{"".join(lines)}</svg>'
    )
