"""Which worker reads a prompt and which one writes the answer.

Every way that is open is costed for a shortlist of workers, and the cheapest is taken; see docs/placement.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import itemgetter

from twostroke.errors import NoWorkerError
from twostroke.policy.cost import Costing, needed_blocks
from twostroke.policy.plan import STRICT, Estimate, Limits, Option, Options, Plan, Weights
from twostroke.policy.shortlist import READERS, WHOLE_ON_DECODE, WHOLE_ON_PREFILL, WRITERS, Shortlists
from twostroke.policy.snapshot import ClusterSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.terms import Kv, Reading, Writing, terms_of

__all__ = ["ClusterSnapshot", "Options", "PlacementRequest", "Plan", "WorkerSnapshot", "place"]

DEFAULT_WEIGHTS = Weights()
DEFAULT_LIMITS = Limits()
ROUNDING = 1e-9
"""By how much the least that a way may cost can be off (Costing.least_reading, least_writing)."""
COST_DIGITS = 4
"""Costs that differ beyond them are alike, and the names decide."""
_first = itemgetter(0)


def place(
    request: PlacementRequest,
    snapshot: ClusterSnapshot,
    options: Options = STRICT,
    *,
    weights: Weights = DEFAULT_WEIGHTS,
    limits: Limits = DEFAULT_LIMITS,
    explain: bool = True,
) -> Plan:
    """The cheapest way that is open.

    explain: whether Plan.why has the best of every way that is open; else it may lack those that are not taken, which
    are then costed only as far as it takes to know that. Raises NoWorkerError when no worker can serve the request at
    all. No room is a Plan to WAIT, and no hope for the deadline a Plan to REFUSE, where those are switched on.
    """
    costing = Costing(request, weights, limits, options)
    deadline_s = request.deadline_s if options.refuse else None
    why = _best_of_each(costing, snapshot, options, explain=explain or deadline_s is not None)
    if len(why) > 1:
        why.sort(key=_rank)
    if not why:
        why = [_alone(costing, Option.D_ALONE, worker) for worker in snapshot.workers if _is_both(worker)]
        why = sorted(why, key=_rank)[:1]
    if not why:
        raise NoWorkerError(_nobody(snapshot, options))
    best = why[0]
    if deadline_s is not None:
        soonest = min(why, key=lambda estimate: estimate.finish_s)
        late_s = soonest.finish_s - deadline_s * (1 + weights.refuse_margin)
        if late_s > 0:
            # Queues drain a second per second; what is late without a queue stays late.
            retry_after_s = late_s if late_s <= soonest.queue_s else None
            return Plan(None, "", Option.REFUSE, retry_after_s=retry_after_s, why=why)
    if options.wait and not best.fits and _could_fit(request, snapshot):
        return Plan(None, "", Option.WAIT, why=why)
    return Plan(
        prefill=best.prefill if best.prefill != best.decode else None,
        decode=best.decode,
        option=best.option,
        chunk_tokens=best.chunk_tokens if best.option is Option.LENT_DECODER else None,
        chosen=best,
        why=why,
    )


def _rank(estimate: Estimate) -> tuple[bool, bool, float, str, str]:
    cost = round(estimate.own_cost + estimate.disturbed_cost + estimate.crowding, COST_DIGITS)
    return estimate.avoided, not estimate.fits, cost, estimate.prefill, estimate.decode


class _Best:
    """The best of the ways that were offered, and what can still replace it.

    most: what costs more cannot, roundings included, unless its flags (avoided, does not fit) are better.
    fine: no flags can be.
    """

    __slots__ = ("_rank", "estimate", "fine", "flags", "most")

    def __init__(self) -> None:
        self.estimate: Estimate | None = None
        self.fine = False
        self.flags = (True, True)
        self.most = math.inf
        self._rank: tuple[bool, bool, float, str, str] | None = None

    def offer(self, estimate: Estimate) -> None:
        """A way that is open."""
        rank = _rank(estimate)
        if self._rank is not None and self._rank <= rank:
            return
        self.estimate, self._rank = estimate, rank
        self.flags = avoided, unfit = rank[:2]
        self.fine = not (avoided or unfit)
        cost = estimate.own_cost + estimate.disturbed_cost + estimate.crowding
        self.most = cost + 10**-COST_DIGITS + ROUNDING * (1 + abs(cost))

    def excludes(self, least: float, reading: Reading, writing: Writing) -> bool:
        """Whether such a way, which costs at least so much, cannot replace it."""
        return least > self.most and (self.fine or _flags(reading, writing) >= self.flags)


def _best_of_each(costing: Costing, snapshot: ClusterSnapshot, options: Options, *, explain: bool) -> list[Estimate]:
    """explain: as in place. Without it every way has to be better than those before it."""
    listed = Shortlists(costing, snapshot.workers)
    found = [_Best()]

    def best() -> _Best:
        if explain:
            found.append(_Best())
        return found[-1]

    if options.p_then_d:
        _pairs(costing, snapshot, listed, best())
    if options.d_alone:
        _each_alone(costing, Option.D_ALONE, listed.first(WHOLE_ON_DECODE), best())
    if options.p_alone:
        _each_alone(costing, Option.P_ALONE, listed.first(WHOLE_ON_PREFILL), best())
    if options.lent_decoder:
        _lent(costing, snapshot, listed, best())
    return [each.estimate for each in found if each.estimate is not None]


def _pairs(costing: Costing, snapshot: ClusterSnapshot, listed: Shortlists, best: _Best) -> None:
    """The shortlisted pairs; the lists grow until one of them can exchange KV, or all are in."""
    size = costing.limits.shortlist
    while True:
        reads = []
        for worker in listed.first(READERS, size):
            terms = worker.terms or terms_of(worker)
            reads.append((costing.wait_s(worker), worker, terms.chunk_tokens))
        _each_pair(costing, snapshot, Option.P_THEN_D, reads, listed.first(WRITERS, size), best)
        if best.estimate is not None or size >= listed.longest:
            return
        size *= 4


def _each_pair(
    costing: Costing,
    snapshot: ClusterSnapshot,
    option: Option,
    reads: list[tuple[float, WorkerSnapshot, int]],
    writers: Sequence[WorkerSnapshot],
    best: _Best,
) -> None:
    """All pairs. What cannot be the best by the least that it may cost is not costed.

    reads: (wait in seconds, reader, tokens of a chunk).
    """
    if not reads or not writers:
        return
    kv = Kv(snapshot.kv_bytes_per_token, snapshot.streams_kv)
    refused, links, default = snapshot.refused_pairs, snapshot.links, snapshot.default_link
    writes: list[tuple[float, Writing]] = []
    least_chunk = min([read[2] for read in reads])
    for worker in writers:
        writing = costing.writing(worker)
        handoff_s = 0.0 if links else default.latency_s + kv.least_s(writing.missing_tokens, least_chunk, default)
        writes.append((costing.least_writing(writing, handoff_s), writing))
    reads.sort(key=_first)
    writes.sort(key=_first)
    least_of_all = writes[0][0]
    for wait_s, reader, chunk_tokens in reads:
        if best.fine and costing.least_reading(wait_s) + least_of_all > best.most:
            break
        reading = costing.reading(reader, chunk_tokens)
        for least_write, writing in writes:
            if best.excludes(reading.least + least_write, reading, writing):
                if best.fine:
                    break
                continue
            pair = (reader.worker, writing.worker.worker)
            if reader is writing.worker or pair in refused:
                continue
            link = links.get(pair, default) if links else default
            if link.healthy:
                best.offer(costing.estimate(option, reading, writing, link, kv))


def _each_alone(costing: Costing, option: Option, workers: Sequence[WorkerSnapshot], best: _Best) -> None:
    """The workers that do both, costed as in _each_pair."""
    for worker in workers:
        if best.fine and worker.reads_prompts and costing.least_alone(worker) > best.most:
            continue
        writing = costing.writing(worker)
        least_write = costing.least_writing(writing, 0.0)
        if best.fine and costing.least_reading(costing.wait_s(worker)) + least_write > best.most:
            continue
        reading = costing.reading(worker)
        if not best.excludes(reading.least + least_write, reading, writing):
            best.offer(costing.alone(option, reading, writing))


def _lent(costing: Costing, snapshot: ClusterSnapshot, listed: Shortlists, best: _Best) -> None:
    """Decode workers that read in bounded chunks: each writes itself, or the best other one does."""
    lenders = listed.first(WHOLE_ON_DECODE, (costing.limits.shortlist + 1) // 2)
    reads = [(0.0, worker, chunk) for worker in lenders if (chunk := costing.lent_chunk_tokens(worker))]
    for _, worker, chunk in reads:
        reading, writing = costing.reading(worker, chunk), costing.writing(worker)
        if not best.excludes(reading.least + costing.least_writing(writing, 0.0), reading, writing):
            best.offer(costing.alone(Option.LENT_DECODER, reading, writing))
    if reads:
        _each_pair(costing, snapshot, Option.LENT_DECODER, reads, listed.first(WRITERS, 2), best)


def _flags(reading: Reading, writing: Writing) -> tuple[bool, bool]:
    return reading.avoided or writing.avoided, not (reading.fits and writing.fits)


def _alone(costing: Costing, option: Option, worker: WorkerSnapshot) -> Estimate:
    return costing.alone(option, costing.reading(worker), costing.writing(worker))


def _is_both(worker: WorkerSnapshot) -> bool:
    return worker.reads_prompts and worker.writes_answers


def _could_fit(request: PlacementRequest, snapshot: ClusterSnapshot) -> bool:
    """Whether room may come: some worker is large enough, or may be."""
    return any(
        not worker.total_blocks or needed_blocks(request, worker) <= worker.total_blocks for worker in snapshot.workers
    )


def _nobody(snapshot: ClusterSnapshot, options: Options) -> str:
    if not snapshot.workers:
        return "no worker is ready; see `twostroke status`"
    if options.p_then_d:
        return "no prefill worker and decode worker that can exchange KV are ready; see `twostroke status`"
    return "no worker is ready that the options of placement let serve alone; see `twostroke status`"
