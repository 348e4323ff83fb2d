"""Which worker reads a prompt and which one writes the answer.

Every way that is open is costed for a shortlist of workers, and the cheapest is taken; see docs/placement.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from twostroke.errors import NoWorkerError
from twostroke.policy.cost import MANY, Costing, Kv, Reading, Writing, needed_blocks
from twostroke.policy.plan import STRICT, Estimate, Limits, Option, Options, Plan, Weights
from twostroke.policy.snapshot import ClusterSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.step_model import StepBatch, chunk_pairs

__all__ = ["ClusterSnapshot", "Options", "PlacementRequest", "Plan", "WorkerSnapshot", "place"]

DEFAULT_WEIGHTS = Weights()
DEFAULT_LIMITS = Limits()


def place(
    request: PlacementRequest,
    snapshot: ClusterSnapshot,
    options: Options = STRICT,
    *,
    weights: Weights = DEFAULT_WEIGHTS,
    limits: Limits = DEFAULT_LIMITS,
) -> Plan:
    """The cheapest way that is open.

    Raises NoWorkerError when no worker can serve the request at all. No room is a Plan to WAIT, and no hope for the
    deadline a Plan to REFUSE, where those are switched on.
    """
    costing = Costing(request, weights, limits, options)
    why = sorted(_best_of_each(costing, snapshot, options), key=_rank)
    if not why:
        why = [_alone(costing, Option.D_ALONE, worker) for worker in snapshot.workers if _is_both(worker)]
        why = sorted(why, key=_rank)[:1]
    if not why:
        raise NoWorkerError(_nobody(snapshot, options))
    best = why[0]
    if options.refuse and request.deadline_s is not None:
        soonest = min(why, key=lambda estimate: estimate.finish_s)
        late_s = soonest.finish_s - request.deadline_s * (1 + weights.refuse_margin)
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


def _rank(estimate: Estimate) -> tuple[object, ...]:
    cost = round(estimate.cost + estimate.crowding, 4)
    return estimate.avoided, not estimate.fits, cost, estimate.prefill, estimate.decode


def _best_of_each(costing: Costing, snapshot: ClusterSnapshot, options: Options) -> Iterator[Estimate]:
    listed = _Shortlists(costing, snapshot.workers)
    if options.p_then_d and (best := _best_pair(costing, snapshot, listed)):
        yield best
    for is_open, option, workers in (
        (options.d_alone, Option.D_ALONE, listed.whole_on_decode),
        (options.p_alone, Option.P_ALONE, listed.whole_on_prefill),
    ):
        if is_open and workers:
            yield min((_alone(costing, option, worker) for worker in listed.first(workers)), key=_rank)
    if options.lent_decoder and (lent := list(_lent(costing, snapshot, listed))):
        yield min(lent, key=_rank)


def _best_pair(costing: Costing, snapshot: ClusterSnapshot, listed: _Shortlists) -> Estimate | None:
    """The best of the shortlisted pairs; the lists grow until one of them can exchange KV, or all are in."""
    size = costing.limits.shortlist
    while True:
        readings = [costing.reading(worker) for worker in listed.first(listed.readers, size)]
        writings = [costing.writing(worker) for worker in listed.first(listed.writers, size)]
        pairs = _pairs(costing, snapshot, Option.P_THEN_D, readings, writings)
        if best := min(pairs, key=_rank, default=None):
            return best
        if size >= max(len(listed.readers), len(listed.writers)):
            return None
        size *= 4


def _pairs(
    costing: Costing,
    snapshot: ClusterSnapshot,
    option: Option,
    readings: Iterable[Reading],
    writings: Iterable[Writing],
) -> Iterator[Estimate]:
    kv = Kv(snapshot.kv_bytes_per_token, snapshot.streams_kv)
    writings = list(writings)
    for reading in readings:
        for writing in writings:
            pair = (reading.worker.worker, writing.worker.worker)
            if reading.worker is writing.worker or pair in snapshot.refused_pairs:
                continue
            link = snapshot.links.get(pair, snapshot.default_link)
            if link.healthy:
                yield costing.estimate(option, reading, writing, link, kv)


def _alone(costing: Costing, option: Option, worker: WorkerSnapshot, chunk_tokens: int = 0) -> Estimate:
    return costing.alone(option, costing.reading(worker, chunk_tokens), costing.writing(worker))


def _lent(costing: Costing, snapshot: ClusterSnapshot, listed: _Shortlists) -> Iterator[Estimate]:
    """Decode workers that read in bounded chunks: each writes itself, or the best other one does."""
    lenders = listed.first(listed.whole_on_decode, (costing.limits.shortlist + 1) // 2)
    readings = [costing.reading(worker, chunk) for worker in lenders if (chunk := costing.lent_chunk_tokens(worker))]
    for reading in readings:
        yield costing.alone(Option.LENT_DECODER, reading, costing.writing(reading.worker))
    writings = (costing.writing(worker) for worker in listed.first(listed.writers, 2))
    yield from _pairs(costing, snapshot, Option.LENT_DECODER, readings, writings)


class _Shortlists:
    """Workers in the order in which a quick look finds them promising; close looks are for the first of them."""

    def __init__(self, costing: Costing, workers: Iterable[WorkerSnapshot]) -> None:
        self.readers: list[_Scored] = []
        self.writers: list[_Scored] = []
        self.whole_on_prefill: list[_Scored] = []
        self.whole_on_decode: list[_Scored] = []
        self._size = costing.limits.shortlist
        self._look(costing, workers)

    def _look(self, costing: Costing, workers: Iterable[WorkerSnapshot]) -> None:
        """Over every worker of the cluster, so written for speed."""
        request, options = costing.request, costing.options
        breach, tail, lost = costing.weights.breach, costing.weights.tail, costing.weights.lost
        crowd = costing.weights.crowd
        cached_tokens, avoid = request.cached_tokens, request.avoid
        prompt_tokens, answer_tokens = request.prompt_tokens, max(1, request.expected_output_tokens)
        answer_context = prompt_tokens + answer_tokens // 2
        per_ttft, per_itl = 1 / request.slo.ttft_s, 1 / request.slo.itl_s
        decode_reads = options.d_alone or options.lent_decoder
        for worker in workers:
            name, answers = worker.worker, worker.running_sequences
            tokens = max(1, prompt_tokens - cached_tokens.get(name, 0))
            token_s = worker.prefill_token_s or _prefill_token_s(worker)
            read = (worker.pending_prompt_tokens + tokens) * token_s * per_ttft
            avoided = name in avoid
            writes = worker.writes_answers
            if worker.reads_prompts:
                self.readers.append((avoided, read, name, worker))
            if not writes and not options.p_alone:
                continue
            base_s, slope_s = worker.step_model.decode_terms(answers + 1)
            write_s = base_s + slope_s * (worker.context_tokens + answer_context)
            write = write_s * per_itl + crowd * answers / (worker.max_sequences or MANY)
            last = avoided or prompt_tokens + answer_tokens >= worker.free_blocks * worker.block_size_tokens
            if not writes:
                self.whole_on_prefill.append((last, read + write, name, worker))
                continue
            self.writers.append((last, write, name, worker))
            if decode_reads:
                chunk = min(tokens, worker.step_budget_tokens)
                slo_s = worker.slo.itl_s
                full, share = (write_s + chunk * token_s) / slo_s, tokens / (chunk * answer_tokens)
                stall = share * (full + breach * (full - 1) if full > 1 else full) - share * write_s / slo_s
                if full > 1 and share > tail:
                    stall += lost * min(1.0, full - 1) * min(1.0, share / tail - 1)
                stalls = (answers or 1) * stall
                read = read + breach * (read - 1) if read > 1 else read
                self.whole_on_decode.append((last, read + write + stalls, name, worker))

    def first(self, scored: list[_Scored], size: int = 0) -> list[WorkerSnapshot]:
        """The most promising ones of a list."""
        return [entry[3] for entry in heapq.nsmallest(size or self._size, scored)]


_Scored = tuple[bool, float, str, WorkerSnapshot]


def _prefill_token_s(worker: WorkerSnapshot) -> float:
    budget = worker.step_budget_tokens
    return worker.step_model.step_s(StepBatch(0, 0, budget, chunk_pairs(0, budget), 1)) / budget


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
