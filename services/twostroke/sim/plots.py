"""Pages and plots without script and without any other host: HTML and inline SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, PAD = 520, 300, 52

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 1120px; padding: 0 1em; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { padding: 3px 8px; border-bottom: 1px solid #ddd }
td:not(:first-child), th:not(:first-child) { text-align: right; white-space: nowrap }
.plots { display: flex; flex-wrap: wrap; gap: 1em } svg { border: 1px solid #ddd } .wide { overflow-x: auto }
"""
_DASH = 'stroke="#666" stroke-dasharray="5 4"'
_BAR, _LETTER = 36, 7


@dataclass(frozen=True, slots=True)
class Axis:
    """From low to high, which are above 0 where it is logarithmic."""

    name: str
    high: float
    low: float = 0.0
    log: bool = False

    def share(self, value: float) -> float:
        """Where a value lies, from 0 at low to 1 at high; one beyond an end lies at that end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Quarters, or powers of ten."""
        if not self.log:
            return [self.low + (self.high - self.low) * step / 4 for step in range(5)]
        first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
        return [10.0**power for power in range(first, last + 1)]


@dataclass(frozen=True, slots=True)
class Plot:
    """A frame with two axes."""

    title: str
    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        return PAD + self.x.share(x) * (WIDTH - 2 * PAD), HEIGHT - PAD - self.y.share(y) * (HEIGHT - 2 * PAD)

    def limits(self, x: float = 0.0, y: float = 0.0) -> str:
        """Dashed lines at values that are not 0 and within the frame."""
        lines = ""
        if self.x.low < x <= self.x.high:
            px, _ = self.at(x, self.y.low)
            lines += f'<line x1="{px:.1f}" x2="{px:.1f}" y1="{PAD}" y2="{HEIGHT - PAD}" {_DASH}/>'
        if self.y.low < y <= self.y.high:
            _, py = self.at(self.x.low, y)
            lines += f'<line x1="{PAD}" x2="{WIDTH - PAD}" y1="{py:.1f}" y2="{py:.1f}" {_DASH}/>'
        return lines

    def draw(self, inside: str) -> str:
        """The plot as SVG. inside: what is drawn in the frame, as SVG."""
        ticks = []
        for value in self.x.ticks():
            x, _ = self.at(value, self.y.low)
            ticks.append(
                f'<text x="{x:.0f}" y="{HEIGHT - PAD + 16}" font-size="11" text-anchor="middle">{value:,g}</text>'
            )
        for value in self.y.ticks():
            _, y = self.at(self.x.low, value)
            ticks.append(f'<text x="{PAD - 6}" y="{y + 4:.0f}" font-size="11" text-anchor="end">{value:,g}</text>')
        head = f'<text x="12" y="20" font-size="14">{escape(self.title)}</text>'
        return (
            f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{head}'
            f'<path d="M{PAD},{PAD} V{HEIGHT - PAD} H{WIDTH - PAD}" fill="none" stroke="#222"/>{"".join(ticks)}'
            f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" font-size="12" text-anchor="middle">{escape(self.x.name)}</text>'
            f'<text x="12" y="{PAD - 12}" font-size="12">{escape(self.y.name)}</text>{inside}</svg>'
        )


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar. text: written at its end; a value that is not finite has no bar."""

    name: str
    value: float
    text: str
    color: str


def bars(title: str, entries: Sequence[Bar]) -> str:
    """Horizontal bars from 0."""
    left = 24 + _LETTER * max((len(each.name) for each in entries), default=0)
    finite = [each.value for each in entries if math.isfinite(each.value)]
    longest = nice(max(finite, default=1.0))
    drawn = []
    for index, each in enumerate(entries):
        y = PAD - 16 + index * _BAR
        width = each.value / longest * (WIDTH - left - 90) if math.isfinite(each.value) else 0.0
        drawn.append(
            f'<text x="12" y="{y + 15}" font-size="12">{escape(each.name)}</text>'
            f'<rect x="{left}" y="{y}" width="{width:.1f}" height="20" fill="{each.color}" fill-opacity="0.7"/>'
            f'<text x="{left + 6 + width:.1f}" y="{y + 15}" font-size="12">{escape(each.text)}</text>'
        )
    head = f'<text x="12" y="20" font-size="14">{escape(title)}</text>'
    height = max(HEIGHT, PAD + _BAR * len(entries))
    return f'<svg width="{WIDTH}" height="{height}" role="img">{head}{"".join(drawn)}</svg>'


def page(title: str, body: str) -> str:
    """A whole document. body: HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of texts that scrolls where it is too wide."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    lines = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>{lines}</table></div>'


def nice(value: float) -> float:
    """The next of 1, 2, 4, 5, 8 times a power of ten."""
    if value <= 0 or not math.isfinite(value):
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 5, 8, 10, 20) if step * power >= value)
