"""Which worker reads a prompt and which one writes the answer.

Every way that is open is costed for a shortlist of workers, and the cheapest is taken; see docs/placement.md.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from operator import itemgetter

from twostroke.errors import NoWorkerError
from twostroke.policy.cost import MANY, Costing, needed_blocks
from twostroke.policy.plan import STRICT, Estimate, Limits, Option, Options, Plan, Weights
from twostroke.policy.snapshot import ClusterSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.step_model import chunk_pairs
from twostroke.policy.terms import Kv, Reading, Writing, terms_of

__all__ = ["ClusterSnapshot", "Options", "PlacementRequest", "Plan", "WorkerSnapshot", "place"]

DEFAULT_WEIGHTS = Weights()
DEFAULT_LIMITS = Limits()
ROUNDING = 1e-9
"""By how much the least that a way may cost can be off (Costing.least_reading, least_writing)."""
COST_DIGITS = 4
"""Costs that differ beyond them are alike, and the names decide."""
_FEW = 32
"""Of so few workers sorting all is the quickest way to the best."""
_READERS, _WRITERS, _WHOLE_ON_PREFILL, _WHOLE_ON_DECODE = range(4)
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

    most: what costs more cannot, roundings included, unless its flags (avoided, does not fit) are better. fine: no flags
    are.
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
    listed = _Shortlists(costing, snapshot.workers)
    found = [_Best()]

    def best() -> _Best:
        if explain:
            found.append(_Best())
        return found[-1]

    if options.p_then_d:
        _pairs(costing, snapshot, listed, best())
    if options.d_alone:
        _each_alone(costing, Option.D_ALONE, listed.first(_WHOLE_ON_DECODE), best())
    if options.p_alone:
        _each_alone(costing, Option.P_ALONE, listed.first(_WHOLE_ON_PREFILL), best())
    if options.lent_decoder:
        _lent(costing, snapshot, listed, best())
    return [each.estimate for each in found if each.estimate is not None]


def _pairs(costing: Costing, snapshot: ClusterSnapshot, listed: _Shortlists, best: _Best) -> None:
    """The shortlisted pairs; the lists grow until one of them can exchange KV, or all are in."""
    size = costing.limits.shortlist
    while True:
        reads = []
        for worker in listed.first(_READERS, size):
            terms = worker.terms or terms_of(worker)
            reads.append((terms.backlog_s, worker, terms.chunk_tokens))
        _each_pair(costing, snapshot, Option.P_THEN_D, reads, listed.first(_WRITERS, size), best)
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

    reads: (backlog in seconds, reader, tokens of a chunk).
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
    for backlog_s, reader, chunk_tokens in reads:
        if best.fine and costing.least_reading(backlog_s) + least_of_all > best.most:
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
        if best.fine and costing.least_reading(writing.terms.backlog_s) + least_write > best.most:
            continue
        reading = costing.reading(worker)
        if not best.excludes(reading.least + least_write, reading, writing):
            best.offer(costing.alone(option, reading, writing))


def _lent(costing: Costing, snapshot: ClusterSnapshot, listed: _Shortlists, best: _Best) -> None:
    """Decode workers that read in bounded chunks: each writes itself, or the best other one does."""
    lenders = listed.first(_WHOLE_ON_DECODE, (costing.limits.shortlist + 1) // 2)
    reads = [(0.0, worker, chunk) for worker in lenders if (chunk := costing.lent_chunk_tokens(worker))]
    for _, worker, chunk in reads:
        reading, writing = costing.reading(worker, chunk), costing.writing(worker)
        if not best.excludes(reading.least + costing.least_writing(writing, 0.0), reading, writing):
            best.offer(costing.alone(Option.LENT_DECODER, reading, writing))
    if reads:
        _each_pair(costing, snapshot, Option.LENT_DECODER, reads, listed.first(_WRITERS, 2), best)


def _flags(reading: Reading, writing: Writing) -> tuple[bool, bool]:
    return reading.avoided or writing.avoided, not (reading.fits and writing.fits)


def _alone(costing: Costing, option: Option, worker: WorkerSnapshot) -> Estimate:
    return costing.alone(option, costing.reading(worker), costing.writing(worker))


class _Shortlists:
    """Workers in the order in which a quick look finds them promising; close looks are for the first of them."""

    def __init__(self, costing: Costing, workers: Sequence[WorkerSnapshot]) -> None:
        self._costing = costing
        readers: list[WorkerSnapshot] = []
        writers: list[WorkerSnapshot] = []
        others: list[WorkerSnapshot] = []
        for worker in workers:
            if worker.reads_prompts:
                readers.append(worker)
            (writers if worker.writes_answers else others).append(worker)
        self._all = readers, writers, others, writers
        self._scored: dict[bool, tuple[list[_Scored], list[_Scored], list[_Scored]]] = {}

    @property
    def longest(self) -> int:
        """How many there are at most, of readers and of writers."""
        return max(len(self._all[0]), len(self._all[1]))

    def first(self, kind: int, size: int = 0) -> list[WorkerSnapshot]:
        """The most promising ones of a kind; all of them, in any order, where those are no more."""
        size = size or self._costing.limits.shortlist
        found = self._all[kind]
        if len(found) <= size:
            return found
        if kind == _READERS:
            scored = self._look(True)[0] + self._look(False)[0]
        elif kind == _WRITERS:
            scored = self._look(True)[1]
        else:
            scored = self._look(kind == _WHOLE_ON_DECODE)[2]
        best = heapq.nsmallest(size, scored) if len(scored) > _FEW else sorted(scored)[:size]
        return [entry[3] for entry in best]

    def _look(self, writes: bool) -> tuple[list[_Scored], list[_Scored], list[_Scored]]:
        """(as readers, as writers, as both) of the workers that write, or of the others."""
        found = self._scored.get(writes)
        if found is None:
            workers = self._all[_WRITERS if writes else _WHOLE_ON_PREFILL]
            found = self._scored[writes] = self._score(workers, writes)
        return found

    def _score(self, workers: list[WorkerSnapshot], writes: bool) -> tuple[list[_Scored], list[_Scored], list[_Scored]]:
        """Over every worker of the cluster, so written for speed."""
        costing = self._costing
        request, options, weights = costing.request, costing.options, costing.weights
        breach, tail, lost = weights.breach, weights.tail, weights.lost
        crowd = weights.crowd
        cached_tokens, avoid = request.cached_tokens, request.avoid
        prompt_tokens, answer_tokens = request.prompt_tokens, max(1, request.expected_output_tokens)
        answer_context = prompt_tokens + answer_tokens // 2
        per_ttft, per_itl = 1 / request.slo.ttft_s, 1 / request.slo.itl_s
        pairs, writers_too = options.p_then_d, options.p_then_d or options.lent_decoder
        alone = options.d_alone or options.lent_decoder if writes else options.p_alone
        readers: list[_Scored] = []
        writers: list[_Scored] = []
        both: list[_Scored] = []
        for worker in workers:
            name, answers = worker.worker, worker.running_sequences
            tokens = max(1, prompt_tokens - cached_tokens.get(name, 0))
            token_s = worker.prefill_token_s or _prefill_token_s(worker)
            read = (worker.pending_prompt_tokens + tokens) * token_s * per_ttft
            avoided = name in avoid
            if pairs and worker.reads_prompts:
                readers.append((avoided, read, name, worker))
            if not writes and not alone:
                continue
            terms = worker.terms or terms_of(worker)
            write_s = terms.base_s + terms.slope_s * (worker.context_tokens + answer_context)
            write = write_s * per_itl + crowd * answers / (worker.max_sequences or MANY)
            last = avoided or prompt_tokens + answer_tokens >= terms.room_tokens
            if not writes:
                both.append((last, read + write, name, worker))
                continue
            if writers_too:
                writers.append((last, write, name, worker))
            if alone:
                chunk = min(tokens, worker.step_budget_tokens)
                slo_s = worker.slo.itl_s
                full, share = (write_s + chunk * token_s) / slo_s, tokens / (chunk * answer_tokens)
                stall = share * (full + breach * (full - 1) if full > 1 else full) - share * write_s / slo_s
                if full > 1 and share > tail:
                    stall += lost * min(1.0, full - 1) * min(1.0, share / tail - 1)
                stalls = (answers or 1) * stall
                read = read + breach * (read - 1) if read > 1 else read
                both.append((last, read + write + stalls, name, worker))
        return readers, writers, both


_Scored = tuple[bool, float, str, WorkerSnapshot]


def _prefill_token_s(worker: WorkerSnapshot) -> float:
    budget = worker.step_budget_tokens
    return worker.step_model.batch_s(0, 0, budget, chunk_pairs(0, budget)) / budget


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
