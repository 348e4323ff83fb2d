"""Rows, tables and checks of `make bench-serve`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from twostroke.bench.record import Record
from twostroke.bench.serve import systems
from twostroke.bench.serve.stats import ALL, DURING, Figures, Played, figures, medians
from twostroke.bench.serve.systems import System
from twostroke.bench.serve.traffic import CHAT, DOCUMENT
from twostroke.measures import SloLimits

MIXED = "mixed"
"""The mix in which chats and documents meet."""
STREAMS = "streams"
"""The mix in which every system writes as many answers while a document is read."""

MOST_DOCUMENT_TTFT = 1.3
LEAST_CUT_DEFAULT, LEAST_CUT_BEST = 0.92, 0.65
MOST_CHAT_TTFT_S = 1.5
LEAST_GOODPUT = 1.3
MOST_LATE_S = 0.1
MOST_OTHER_CPU = 0.05

Numbers = Mapping[str, Mapping[str, Mapping[str, Figures]]]
"""By mix, by label of the system, by part: medians over the rounds."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


_COLUMNS = {
    "TTFT p50 s": ("ttft_p50_s", ".2f"),
    "p99": ("ttft_p99_s", ".2f"),
    "p99.9": ("ttft_p999_s", ".2f"),
    "max": ("ttft_max_s", ".2f"),
    "ITL p50 ms": ("itl_p50_ms", ",.0f"),
    "p99 ": ("itl_p99_ms", ",.0f"),
    "p99.9 ": ("itl_p999_ms", ",.0f"),
    "max ": ("itl_max_ms", ",.0f"),
    "stalls": ("stall_share", ".0%"),
    "in SLO": ("attainment", ".0%"),
    "goodput/s": ("goodput", ".3f"),
    "tok/s": ("tokens_per_s", ".1f"),
    "CPU s": ("cpu_s", ".1f"),
    "failed": ("failed", ".0f"),
}
"""Title -> (figure, format). Trailing spaces tell equal titles apart."""


def numbers(played: Sequence[Played], slos: Mapping[str, SloLimits]) -> Numbers:
    """Medians over the rounds of each system and mix, in the order in which they were first played."""
    found: dict[str, dict[str, list[Mapping[str, Figures]]]] = {}
    for each in played:
        found.setdefault(each.mix, {}).setdefault(each.system, []).append(figures(each, slos))
    return {mix: {name: medians(rounds) for name, rounds in by.items()} for mix, by in found.items()}


def rows(
    record: Record,
    made: Numbers,
    slos: Mapping[str, SloLimits],
    rounds: Mapping[tuple[str, str], int],
    speed: float = 1.0,
) -> None:
    """One row per mix, system and part. rounds: how many there were of each mix and system; speed: by which the file's
    arrivals were divided."""
    for mix, by_system in made.items():
        for system, parts in by_system.items():
            for part, values in parts.items():
                kind = CHAT if part == DURING else part
                slo = slos[kind].text() if kind in slos else None
                asked = {"rounds": rounds[mix, system], "speed": speed, "slo": slo}
                record.row(mix=mix, system=system, of=part, **asked, **values)


def tables(made: Numbers) -> Iterator[Table]:
    """One per mix, a row for each system and part; columns that are empty throughout are left out."""
    for mix, by_system in made.items():
        lines = [(system, part, values) for system, parts in by_system.items() for part, values in _shown(parts)]
        shown = {
            title: (key, form)
            for title, (key, form) in _COLUMNS.items()
            if any(math.isfinite(values.get(key, math.nan)) for _, _, values in lines)
        }
        yield Table(
            mix,
            ("system", "of", *shown),
            [
                (system, part, *(_text(values.get(key, math.nan), form) for key, form in shown.values()))
                for system, part, values in lines
            ],
        )


def _shown(parts: Mapping[str, Figures]) -> Iterator[tuple[str, Figures]]:
    """Where there is but one kind of request, it is all."""
    kinds = parts.keys() & {CHAT, DOCUMENT}
    for part, values in parts.items():
        if len(kinds) > 1 or part not in (ALL, *kinds):
            yield part, values
        elif part in kinds:
            yield part, {**parts.get(ALL, {}), **values}


def _text(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else ""


def best_chunk(made: Numbers, measured: Sequence[System]) -> System | None:
    """Of the chunk sizes that were measured: most goodput over all mixes, then the smallest ITL p99 of chats."""
    sizes = [each for each in measured if each.name == systems.CHUNKED]

    def rank(each: System) -> tuple[float, float]:
        goodput = sum(_of(made, mix, each.label, ALL, "goodput", 0.0) for mix in made)
        return -goodput, _of(made, MIXED, each.label, DURING, "itl_p99_ms", math.inf)

    return min(sizes, key=rank, default=None)


def ours(measured: Sequence[System]) -> str:
    """Which of our systems is held against the others: with all options, if it was measured."""
    return systems.STRICT if all(each.name != systems.ALL for each in measured) else systems.ALL


def checks(record: Record, made: Numbers, measured: Sequence[System]) -> None:
    """What is expected of twostroke. What was not measured is not ok."""
    own, best = ours(measured), best_chunk(made, measured)
    chunked = best.label if best else systems.CHUNKED
    for mix in ("documents", MIXED):
        _times(record, made, mix, own)
    for mix in (MIXED, STREAMS):
        _cuts(record, made, mix, own, chunked)
    ttft_s = _of(made, MIXED, own, CHAT, "ttft_p99_s")
    theirs_s = _of(made, MIXED, systems.VLLM_ROUTER, CHAT, "ttft_p99_s")
    record.check(
        f"TTFT p99 of chats beside documents ({own}, {MIXED}; vllm-router in P/D mode {known(theirs_s)} s)",
        ttft_s,
        "s",
        f"<= {MOST_CHAT_TTFT_S:g} s",
        ttft_s <= MOST_CHAT_TTFT_S,
    )
    _goodputs(record, made, own, chunked, [each.label for each in measured if each.name not in systems.OURS])


def _times(record: Record, made: Numbers, mix: str, own: str) -> None:
    one_s, own_s = (_of(made, mix, system, DOCUMENT, "ttft_p50_s") for system in (systems.ONE, own))
    record.check(
        f"TTFT p50 of documents against one server on both cores ({own}, {mix})",
        own_s / one_s,
        "",
        f"<= {MOST_DOCUMENT_TTFT:g} times {known(one_s)} s",
        own_s <= MOST_DOCUMENT_TTFT * one_s,
    )


def _cuts(record: Record, made: Numbers, mix: str, own: str, chunked: str) -> None:
    own_ms = _of(made, mix, own, DURING, "itl_p99_ms")
    for system, least in ((systems.ONE, LEAST_CUT_DEFAULT), (chunked, LEAST_CUT_BEST), (systems.VLLM_ROUTER, 0.0)):
        theirs_ms = _of(made, mix, system, DURING, "itl_p99_ms")
        cut = 1 - own_ms / theirs_ms
        record.check(
            f"ITL p99 of chats while documents are read: how much lower than with {system} ({own}, {mix})",
            cut * 100,
            "%",
            f"{'>=' if least else '>'} {least * 100:.0f} % of {known(theirs_ms)} ms",
            cut >= least if least else cut > 0,
        )


def _goodputs(record: Record, made: Numbers, own: str, chunked: str, others: Sequence[str]) -> None:
    own_rate = _of(made, MIXED, own, ALL, "goodput")
    best = max(others, key=lambda system: _of(made, MIXED, system, ALL, "goodput", 0.0), default="")
    best_rate = _of(made, MIXED, best, ALL, "goodput")
    record.check(
        f"goodput against the best that is not twostroke, {best or 'not measured'} ({own}, {MIXED})",
        own_rate / best_rate if best_rate else math.nan,
        "",
        f">= {LEAST_GOODPUT:g} times {known(best_rate)} requests/s",
        own_rate >= LEAST_GOODPUT * best_rate,
    )
    for mix in made:
        rate = _of(made, mix, own, ALL, "goodput")
        rates = [_of(made, mix, system, ALL, "goodput") for system in (systems.ONE, chunked)]
        least = max((each for each in rates if math.isfinite(each)), default=math.nan)
        record.check(
            f"goodput, never below one server at either chunk size ({own}, {mix})",
            rate,
            "requests/s",
            f">= {known(least)}",
            rate >= least,
        )


def validity(record: Record, made: Numbers, texts: Mapping[str, str], lost: Sequence[str]) -> None:
    """What the comparison rests on: all was measured and answered, equally, and asked in time.

    texts: of each system, its greedy answer to the same prompt; lost: what could not be measured.
    """
    record.check("runs of a system that broke off", len(lost), "", "0", not lost)
    parts = [made[mix][system][ALL] for mix in made for system in made[mix]]
    failed = sum(part["failed"] for part in parts)
    record.check("requests that failed, median of the rounds, all systems", failed, "", "0", failed == 0)
    different = len(set(texts.values()))
    record.check("different greedy answers of the systems to one prompt", different, "", "1", different == 1)
    other = max((part["other_cpu_s"] / part["cpu_s"] for part in parts), default=math.nan)
    goal = f"<= {MOST_OTHER_CPU * 100:.0f} %"
    record.check("CPU time of others, in shares of the system's", other * 100, "%", goal, other <= MOST_OTHER_CPU)
    late_s = max((part["sent_late_s"] for part in parts), default=math.nan)
    record.check("latest request, behind its time", late_s, "s", f"<= {MOST_LATE_S:g}", late_s <= MOST_LATE_S)


def known(value: float) -> str:
    """A figure in a sentence."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if math.isfinite(value) else "(not measured)"


def _of(made: Numbers, mix: str, system: str, part: str, figure: str, default: float = math.nan) -> float:
    return made.get(mix, {}).get(system, {}).get(part, {}).get(figure, default)
