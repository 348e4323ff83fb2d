"""What one playing of a mix comes down to, and what several do. The measures are those of twostroke.measures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.bench.serve.play import Seen
from twostroke.bench.serve.traffic import CHAT, DOCUMENT, KINDS
from twostroke.measures import SloLimits, good, percentile, stall_share, tpot_s

ALL, DURING = "all", "chat during prefill"
PARTS = (ALL, CHAT, DURING, DOCUMENT)
"""Of a mix's requests; DURING has the gaps of chats that lie in the time from sending a document to its first token."""

Figures = Mapping[str, float]
"""By column; a figure that does not exist is missing or NaN."""

_SHARES = (("p50", 0.5), ("p99", 0.99), ("p999", 0.999), ("max", 1.0))


@dataclass(frozen=True, slots=True)
class Played:
    """One system, one mix, one round. CPU times are of all processes of the system, of the client, and of others."""

    system: str
    mix: str
    round: int
    seen: tuple[Seen, ...]
    cpu_s: float
    client_cpu_s: float
    other_cpu_s: float


def figures(played: Played, slos: Mapping[str, SloLimits]) -> dict[str, Figures]:
    """By part of PARTS; parts without requests are missing. slos: by kind.

    Rates are per second from the first arrival to the last, which is the same for every system; the output rate is to
    the last token. Percentiles of TTFT are over answers that came, shares over all requests.
    """
    found: dict[str, Figures] = {}
    by_kind = {kind: [each for each in played.seen if each.arrival.kind == kind] for kind in KINDS}
    arrivals_s = [each.arrival.arrival_s for each in played.seen]
    span_s = max(arrivals_s) - min(arrivals_s)
    passed = {kind: int(_good(seen, slos[kind]).sum()) for kind, seen in by_kind.items()}
    for kind, seen in by_kind.items():
        if seen:
            found[kind] = {
                "requests": len(seen),
                "failed": sum(bool(each.error) for each in seen),
                **_spread("ttft", "s", [each.ttft_s for each in seen if not each.error]),
                **_gaps([gap for each in seen for gap in each.gaps_s], slos[kind]),
                "attainment": passed[kind] / len(seen),
                "goodput": _rate(passed[kind], span_s),
            }
    during = gaps_during_prefill(played.seen)
    if during:
        found[DURING] = _gaps(during, slos[CHAT])
    tokens_s = [at_s for each in played.seen for at_s in each.tokens_s]
    found[ALL] = {
        "requests": len(played.seen),
        "failed": sum(bool(each.error) for each in played.seen),
        "attainment": sum(passed.values()) / len(played.seen),
        "goodput": _rate(sum(passed.values()), span_s),
        "tokens_per_s": len(tokens_s) / (max(tokens_s) - min(arrivals_s)) if tokens_s else 0.0,
        "cpu_s": played.cpu_s,
        "client_cpu_s": played.client_cpu_s,
        "other_cpu_s": played.other_cpu_s,
        "sent_late_s": max(each.sent_s - each.arrival.arrival_s for each in played.seen),
    }
    return {part: found[part] for part in PARTS if part in found}


def gaps_during_prefill(seen: Iterable[Seen]) -> list[float]:
    """Gaps of chats that overlap with the time from sending a document to its first token."""
    seen = list(seen)
    reading = [
        (each.sent_s, each.tokens_s[0] if each.tokens_s else math.inf) for each in seen if each.arrival.kind == DOCUMENT
    ]
    return [
        end_s - begin_s
        for each in seen
        if each.arrival.kind == CHAT
        for begin_s, end_s in zip(each.tokens_s, each.tokens_s[1:], strict=False)
        if any(begin_s < first_s and end_s > sent_s for sent_s, first_s in reading)
    ]


def medians(rounds: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Of every figure over the rounds that have it."""
    return {
        part: {
            name: _median([each[part][name] for each in rounds if part in each])
            for name in next(each[part] for each in rounds if part in each)
        }
        for part in PARTS
        if any(part in each for each in rounds)
    }


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _good(seen: Sequence[Seen], slo: SloLimits) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Of each request; a failed one is not."""
    answered = [each for each in seen if not each.error]
    tokens = np.array([len(each.tokens_s) for each in answered], dtype=np.int64)
    first_s = np.array([each.tokens_s[0] for each in answered])
    last_s = np.array([each.tokens_s[-1] for each in answered])
    over = np.array([sum(gap > slo.itl_s for gap in each.gaps_s) for each in answered], dtype=np.int64)
    return good(slo, np.array([each.ttft_s for each in answered]), tpot_s(first_s, last_s, tokens), over, tokens)


def _gaps(gaps_s: Sequence[float], slo: SloLimits) -> dict[str, float]:
    sizes = np.sort(np.array(gaps_s))
    share = stall_share(sizes, np.ones(len(sizes), dtype=np.int64), slo.itl_s)
    return {**_spread("itl", "ms", [gap * 1e3 for gap in gaps_s]), "stall_share": share}


def _spread(name: str, unit: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{key}_{unit}": percentile(np.array(values), share) for key, share in _SHARES}


def _rate(count: int, span_s: float) -> float:
    return count / span_s if span_s > 0 else math.nan
