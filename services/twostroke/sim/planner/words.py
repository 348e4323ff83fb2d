"""The planner's answer in words and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from twostroke.sim.planner.search import Candidate, Found, Question
from twostroke.sim.planner.verdict import MOST_WORTH, Verdict
from twostroke.sim.show import line, seconds

COLUMNS = (
    "fleet", "GPUs", "$/h", "SLO met", "goodput/s", "per GPU", "per $",
    "TTFT p50", "p99", "p99.9", "ITL p50", "p99", "p99.9", "TPOT p50", "p99", "p99.9", "stalls",
)  # fmt: skip


def cells(each: Candidate) -> list[str]:
    """A candidate's row under COLUMNS."""
    found = each.found
    spreads = [
        seconds(value) for part in (found.ttft, found.itl, found.tpot) for value in (part.p50, part.p99, part.p999)
    ]
    return [
        each.config.text() + (" + policy of all ways" if each.config.policy == "all" else ""),
        str(each.config.gpus),
        f"{each.config.dollars_per_hour:.2f}",
        f"{found.attainment:.1%}",
        f"{found.goodput:.3g}",
        f"{found.goodput_per_gpu:.3g}",
        f"{found.goodput_per_dollar:,.0f}",
        *spreads,
        f"{found.stall_share:.1%}",
    ]


def headline(verdict: Verdict, question: Question) -> list[str]:
    """What to do, why, and how sure it is."""
    chosen = verdict.chosen
    if verdict.answer == "undecided":
        bet = "the safer" if verdict.meets else "the better"
        first = f"Undecided between one pool and two; {bet} bet is {chosen.config.text()}."
    elif verdict.answer == "two pools":
        first = f"Disaggregate. Run {chosen.config.text()}."
    else:
        first = f"Do not disaggregate. Run {chosen.config.text()}."
    text = [first]
    met = f"{chosen.found.attainment:.1%} of the requests meet {question.slo.text()} (asked: {question.target:.0%})"
    if not verdict.meets:
        met = f"No fleet of these GPUs meets the target: with the best one {met}. Add GPUs, or loosen the SLO"
    text.append(met + ".")
    if verdict.two and verdict.one:
        text.append(
            f"Against the best tuned single pool ({verdict.one.config.text()}) the best two pools serve "
            f"{_times(verdict.ratio)} times the load per dollar within the SLO; between {_times(verdict.ratio_low)} "
            f"and {_times(verdict.ratio_high)} over the prediction's 90 % interval (1.00 also where neither holds any)."
        )
        text.append(
            f"Headroom: two pools hold up to {verdict.two_capacity:.2f} times this rate, one pool up to "
            f"{verdict.one_capacity:.2f} times."
        )
    if verdict.corners:
        ttft = [each.ttft.p99 for each in verdict.corners]
        itl = [each.itl.p99 for each in verdict.corners]
        met_share = [each.attainment for each in verdict.corners]
        text.append(
            f"Interval of the chosen fleet: TTFT p99 {seconds(min(ttft))} to {seconds(max(ttft))}, ITL p99 "
            f"{seconds(min(itl))} to {seconds(max(itl))}, SLO met by {min(met_share):.1%} to {max(met_share):.1%}."
        )
    return text


def _times(ratio: float) -> str:
    return f"{MOST_WORTH:.0f} or more" if ratio >= MOST_WORTH else f"{ratio:.2f}"


def flips(verdict: Verdict) -> Iterator[str]:
    """What would turn the answer round."""
    for flip in verdict.flips:
        if flip.value is None:
            yield f"{flip.what}: no change up to a factor of 4 either way"
        else:
            yield f"{flip.what}: at {flip.value} {flip.winner} is the better choice"


def show(console: Console, question: Question, found: Found, verdict: Verdict, rows: int = 10) -> None:
    """Prints it all."""
    console.print()
    for index, text in enumerate(headline(verdict, question)):
        line(console, text, "" if index else "bold")
    if verdict.flips:
        line(console, "What would turn it round between these two pools and one pool of as many GPUs:", "bold")
        for text in flips(verdict):
            line(console, f"  {text}")
    show_table(console, listed(found, verdict, rows))


def show_table(console: Console, candidates: Sequence[Candidate]) -> None:
    """Prints simulated fleets."""
    table = Table(title="simulated fleets, best first", title_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "fleet" else "right")
    for each in candidates:
        table.add_row(*cells(each))
    console.print(table)


def listed(found: Found, verdict: Verdict, rows: int) -> Sequence[Candidate]:
    """The best ones, and the best of each shape wherever it stands.

    Of fleets that differ in a setting without effect (a batch cap that is never reached) one is listed.
    """
    kept: list[Candidate] = []
    for each in found.candidates:
        if len(kept) < rows and not any(_alike(each, other) for other in kept):
            kept.append(each)
    return kept + [each for each in (verdict.two, verdict.one) if each is not None and each not in kept]


def _alike(one: Candidate, other: Candidate) -> bool:
    return one.found == other.found and one.config.dollars_per_hour == other.config.dollars_per_hour


def plain(question: Question, found: Found, verdict: Verdict) -> dict[str, object]:
    """For programs."""
    return {
        "answer": verdict.answer,
        "words": headline(verdict, question),
        "chosen": _plain(verdict.chosen),
        "two_pools": _plain(verdict.two) if verdict.two else None,
        "one_pool": _plain(verdict.one) if verdict.one else None,
        "ratio": [verdict.ratio_low, verdict.ratio, verdict.ratio_high],
        "capacity": {"two_pools": verdict.two_capacity, "one_pool": verdict.one_capacity},
        "flips": [asdict(flip) for flip in verdict.flips],
        "screened": found.screened,
        "candidates": [_plain(each) for each in found.candidates],
    }


def _plain(each: Candidate) -> dict[str, object]:
    return {"config": asdict(each.config), "text": each.config.text(), "result": each.found.plain()}
