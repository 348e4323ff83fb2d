"""What the words mean by which serving is judged, once, for benchmarks, simulator and planner alike.

`python -m twostroke.measures` prints docs/metrics.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twostroke.errors import ConfigError

Floats = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]

TAIL = 0.01
"""Share of an answer's gaps that may be longer than the ITL limit while the answer still meets it; one may in any
case, since the hand-off between the strokes is one."""
STALL_FACTOR = 4.0
"""Without an ITL limit, gaps longer than this many medians are stalls."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One entry of the dictionary. key: as in records and tables; over: what a percentile is taken over."""

    key: str
    name: str
    unit: str
    over: str
    text: str


MEASURES = (
    Measure(
        "ttft", "time to first token", "s", "requests",
        "From the client sending the request to the arrival of the first token; queues, prefill and, where decode "
        "chooses the first token, the hand-off included.",
    ),
    Measure(
        "itl", "inter-token latency, gap", "s", "gaps",
        "Time between two tokens of one answer that follow one another. Percentiles are over all gaps of all answers, "
        "so one stall counts as one gap. The time to the first token is none of them.",
    ),
    Measure(
        "tpot", "time per output token", "s", "requests",
        "(E2E - TTFT) / (tokens - 1) of one answer: the mean of its gaps. Answers of one token have none. It hides "
        "stalls: a second lost once in 500 tokens adds 2 ms.",
    ),
    Measure("e2e", "end to end", "s", "requests", "From sending the request to the arrival of the last token."),
    Measure(
        "stall_share", "stall share", "share", "-",
        "Share of all time between first and last tokens that lies in gaps longer than the ITL limit or, without one, "
        f"longer than {STALL_FACTOR:g} times the median gap.",
    ),
    Measure(
        "attainment", "SLO attainment", "share", "requests",
        "Share of all requests, refused and failed ones included, that meet every limit that is set: TTFT; TPOT; ITL, "
        f"which an answer meets when at most {TAIL:.0%} of its gaps, or a single one, are longer.",
    ),
    Measure(
        "goodput", "goodput", "requests/s", "-",
        "Requests that meet every limit, per second from the first arrival to the last; in a closed loop, to the last "
        "token.",
    ),
    Measure(
        "goodput_per_gpu", "goodput per GPU", "requests/s", "-",
        "Goodput over the mean number of GPUs that were paid for: of both pools, starting and draining ones included.",
    ),
    Measure(
        "goodput_per_dollar", "goodput per dollar", "requests", "-",
        "Good requests over what the GPUs cost from the first arrival to the end.",
    ),
    Measure("tokens_per_s", "output rate", "tokens/s", "-", "Answer tokens per second, first arrival to last token."),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class SloLimits:
    """What a request must meet to be good; 0 sets no limit."""

    ttft_s: float = 0.0
    itl_s: float = 0.0
    tpot_s: float = 0.0

    def faster(self, speed: float) -> SloLimits:
        """The same limits on a machine that is so many times as fast."""
        return SloLimits(self.ttft_s / speed, self.itl_s / speed, self.tpot_s / speed)

    def text(self) -> str:
        """As it is written on a command line."""
        parts = (("ttft", self.ttft_s), ("itl", self.itl_s), ("tpot", self.tpot_s))
        return ",".join(f"{name}={value * 1e3:.4g}ms" for name, value in parts if value) or "none"


def parse_slo(text: str) -> SloLimits:
    """From "ttft=2s,itl=40ms,tpot=50ms", any of them. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, value = part.partition("=")
        for suffix, factor in (("ms", 1e-3), ("s", 1.0)):
            if name in ("ttft", "itl", "tpot") and value.endswith(suffix):
                try:
                    found[f"{name}_s"] = float(value.removesuffix(suffix)) * factor
                    break
                except ValueError:
                    continue
        else:
            raise ConfigError(f"SLO {part!r}: write ttft, itl or tpot with a time, such as ttft=2s,itl=40ms")
    return SloLimits(**found)


def percentile(values: Floats, share: float) -> float:
    """The smallest value that at least `share` (0 to 1) of all values do not exceed; NaN of none."""
    if not len(values):
        return float("nan")
    return float(np.quantile(values, share, method="inverted_cdf"))


def weighted_percentile(sizes: Floats, counts: Counts, share: float) -> float:
    """The same of a histogram in order of size."""
    if not len(sizes):
        return float("nan")
    ends = np.cumsum(counts)
    return float(sizes[min(len(sizes) - 1, int(np.searchsorted(ends, share * ends[-1])))])


def tpot_s(first_s: Floats, end_s: Floats, tokens: Counts) -> Floats:
    """Of each answer; NaN for those of one token."""
    gaps = np.where(tokens > 1, tokens - 1, 1)
    return np.where(tokens > 1, (end_s - first_s) / gaps, np.nan)


def stall_share(sizes: Floats, counts: Counts, limit_s: float = 0.0) -> float:
    """Of a histogram of gaps."""
    if not len(sizes):
        return 0.0
    limit_s = limit_s or STALL_FACTOR * weighted_percentile(sizes, counts, 0.5)
    times = sizes * counts
    return float(times[sizes > limit_s].sum() / times.sum())


def good(slo: SloLimits, ttft: Floats, tpot: Floats, over: Counts, tokens: Counts) -> npt.NDArray[np.bool_]:
    """Which answers meet every limit. over: of each answer's gaps, how many are longer than the ITL limit."""
    result = np.ones(len(ttft), dtype=bool)
    if slo.ttft_s:
        result &= ttft <= slo.ttft_s
    if slo.tpot_s:
        result &= np.isnan(tpot) | (tpot <= slo.tpot_s)
    if slo.itl_s:
        result &= over <= np.maximum(1, TAIL * (tokens - 1))
    return result


def document() -> str:
    """docs/metrics.md."""
    rows = [f"| `{each.key}` | {each.name} | {each.unit} | {each.over} | {each.text} |" for each in MEASURES]
    return "\n".join(
        [
            "# Metrics",
            "",
            "Made by `python -m twostroke.measures > docs/metrics.md` from `services/twostroke/measures.py`, whose",
            "functions benchmarks, simulator and planner use. A percentile p is the smallest value that at least p %",
            "of the values do not exceed. The simulator counts gaps in bins of 0.1 %.",
            "",
            "| key | name | unit | percentiles over | what it is |",
            "|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main(write: Callable[[str], object] = sys.stdout.write) -> None:
    """Prints the document."""
    write(document())


if __name__ == "__main__":
    main()
