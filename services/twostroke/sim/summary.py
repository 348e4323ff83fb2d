"""What a simulation came down to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

import numpy as np
import numpy.typing as npt

from twostroke import measures
from twostroke.measures import SloLimits
from twostroke.sim.cluster import Cluster
from twostroke.sim.recorder import UNSET

QUANTILES = (0.5, 0.9, 0.99, 0.999)


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in seconds: NaN where there is nothing."""

    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    largest: float


@dataclass(frozen=True, slots=True)
class Summary:
    """Measures of one run; see measures.py. All times in seconds.

    unfinished: cut off by Ctrl-C, or waiting for a worker that never came. parts_s: mean time of a finished request in
    each part; they add up to the mean of e2e.
    """

    requests: int
    finished: int
    refused: int
    failed: int
    unfinished: int
    duration_s: float
    ttft: Spread
    itl: Spread
    tpot: Spread
    e2e: Spread
    stall_share: float
    attainment: float
    goodput: float
    goodput_per_gpu: float
    goodput_per_dollar: float
    tokens_per_s: float
    gpu_hours: float
    dollars: float
    parts_s: dict[str, float] = field(default_factory=dict)
    handoffs: int = 0
    handoff_bytes: float = 0.0
    preemptions: int = 0
    cached_share: float = 0.0
    """Of prompt tokens, those found in a prefix cache."""

    def plain(self) -> dict[str, object]:
        """For JSON: NaN becomes None."""
        return _plain(asdict(self))


def _plain(found: dict[str, object]) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, value in found.items():
        if isinstance(value, dict):
            kept[name] = _plain(value)
        elif isinstance(value, float) and not np.isfinite(value):
            kept[name] = None
        else:
            kept[name] = value
    return kept


def summarise(cluster: Cluster, slo: SloLimits) -> Summary:
    """Of a cluster that ran with slo.itl_s as its gap limit."""
    records, traffic = cluster.records, cluster.traffic
    end_s = np.asarray(records.end_s)
    done = end_s != UNSET
    arrival_s = np.asarray(records.arrival_s)
    came = arrival_s != UNSET
    ttft = (np.asarray(records.first_s) - arrival_s)[done]
    e2e = (end_s - arrival_s)[done]
    tokens = np.asarray(traffic.output_tokens)[done]
    tpot = measures.tpot_s(np.asarray(records.first_s)[done], end_s[done], tokens)
    sizes, counts = records.gaps.bins()
    good = measures.good(slo, ttft, tpot, np.asarray(records.over, dtype=np.int64)[done], tokens)
    first_s = float(arrival_s[came].min(initial=cluster.now_s))
    last_s = float(arrival_s[came].max(initial=0.0))
    over_s = max(float(end_s.max(initial=0.0)), last_s) - first_s
    span_s = over_s if traffic.concurrency or last_s <= first_s else last_s - first_s
    gpu_hours, dollars = _paid(cluster)
    requests = int(came.sum())
    goodput = _share(float(good.sum()), span_s)
    prompts = float(np.asarray(traffic.prompt_tokens)[came].sum())
    return Summary(
        requests=requests,
        finished=records.finished,
        refused=records.refused,
        failed=records.failed,
        unfinished=requests - records.finished - records.refused - records.failed,
        duration_s=over_s,
        ttft=_spread(ttft),
        itl=_gap_spread(sizes, counts, records.gaps.largest_s),
        tpot=_spread(tpot[~np.isnan(tpot)]),
        e2e=_spread(e2e),
        stall_share=measures.stall_share(sizes, counts, slo.itl_s),
        attainment=_share(float(good.sum()), requests),
        goodput=goodput,
        goodput_per_gpu=_share(goodput, _share(gpu_hours * 3600, cluster.now_s)),
        goodput_per_dollar=_share(float(good.sum()), dollars),
        tokens_per_s=_share(float(tokens.sum()), over_s),
        gpu_hours=gpu_hours,
        dollars=dollars,
        parts_s=_parts(cluster, done),
        handoffs=records.handoffs,
        handoff_bytes=cluster.handoffs.bytes,
        preemptions=records.preemptions,
        cached_share=_share(records.cached_tokens, prompts),
    )


def _parts(cluster: Cluster, done: npt.NDArray[np.bool_]) -> dict[str, float]:
    records = cluster.records
    if not done.any():
        return {}
    marks = [np.asarray(column)[done] for column in records.marks()]
    return {
        name: float((after - before).mean())
        for name, before, after in zip(records.PARTS, marks, marks[1:], strict=False)
    }


def _paid(cluster: Cluster) -> tuple[float, float]:
    """(GPU hours, dollars) from each worker's order to its end."""
    hours = dollars = 0.0
    for worker in cluster.workers:
        end_s = worker.gone_s if worker.gone_s >= 0 else cluster.now_s
        alive_h = (worker.paid_s + end_s - worker.since_s) / 3600
        hours += alive_h * worker.kind.gpus
        dollars += alive_h * worker.kind.dollars_per_hour
    return hours, dollars


def _share(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _spread(values: measures.Floats) -> Spread:
    mean = float(values.mean()) if len(values) else float("nan")
    p50, p90, p99, p999 = (measures.percentile(values, share) for share in QUANTILES)
    return Spread(mean, p50, p90, p99, p999, float(values.max()) if len(values) else float("nan"))


def _gap_spread(sizes: measures.Floats, counts: measures.Counts, largest_s: float) -> Spread:
    mean = float((sizes * counts).sum() / counts.sum()) if len(sizes) else float("nan")
    p50, p90, p99, p999 = (measures.weighted_percentile(sizes, counts, share) for share in QUANTILES)
    return Spread(mean, p50, p90, p99, p999, largest_s if len(sizes) else float("nan"))
