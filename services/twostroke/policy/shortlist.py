"""The quick look at every worker by which placement chooses those that it costs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from twostroke.policy.cost import MANY, Costing
from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.policy.step_model import chunk_pairs
from twostroke.policy.terms import terms_of
from twostroke.policy.turns import CERTAIN, SPARE_TOKENS, passes

READERS, WRITERS, WHOLE_ON_PREFILL, WHOLE_ON_DECODE = range(4)
"""Kinds of lists: who may read a prompt, write an answer, or do both."""
_FEW = 32
"""Of so few workers sorting all is the quickest way to the best."""
_Scored = tuple[bool, float, str, WorkerSnapshot]


class Shortlists:
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
        if kind == READERS:
            scored = self._look(True)[0] + self._look(False)[0]
        elif kind == WRITERS:
            scored = self._look(True)[1]
        else:
            scored = self._look(kind == WHOLE_ON_DECODE)[2]
        best = heapq.nsmallest(size, scored) if len(scored) > _FEW else sorted(scored)[:size]
        return [entry[3] for entry in best]

    def _look(self, writes: bool) -> tuple[list[_Scored], list[_Scored], list[_Scored]]:
        """(as readers, as writers, as both) of the workers that write, or of the others."""
        found = self._scored.get(writes)
        if found is None:
            workers = self._all[WRITERS if writes else WHOLE_ON_PREFILL]
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
            if tokens >= SPARE_TOKENS:
                token_s *= worker.spare_share
            pending, prompts = worker.pending_prompt_tokens, worker.pending_prompts
            if pending and passes(tokens, pending, prompts):
                slo_ttft_s, step = worker.slo.ttft_s, min(pending, worker.step_budget_tokens)
                now = pending * token_s / slo_ttft_s
                then = now + tokens * token_s / slo_ttft_s
                waits = then - now + (breach * (then - max(now, 1.0)) if then > 1 else 0.0)
                read = (step + step // CERTAIN + tokens) * token_s * per_ttft
                read = (read + breach * (read - 1) if read > 1 else read) + prompts * waits
            else:
                read = (pending + tokens) * token_s * per_ttft
                read = read + breach * (read - 1) if read > 1 else read
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
                # Prompts that come meanwhile make its steps long.
                slow = max(terms.backlog_step_s, terms.prompt_step_s(worker), write_s) * per_itl
                over = slow - 1 if slow > 1 else 0.0
                write += weights.prompt_share * (slow + breach * over) + lost * (over if over < 1 else 1.0)
                both.append((last, read + write, name, worker))
                continue
            if writers_too:
                writers.append((last, write, name, worker))
            if alone:
                chunk = min(tokens, worker.step_budget_tokens)
                slo_s = worker.slo.itl_s
                full, share = (write_s + chunk * token_s) / slo_s, tokens / (chunk * answer_tokens)
                stall = share * (full + breach * (full - 1) if full > 1 else full) - share * write_s / slo_s
                if full > 1:
                    stall += lost * min(1.0, full - 1) * min(1.0, share / tail)
                stalls = (answers or 1) * stall
                both.append((last, read + write + stalls, name, worker))
        return readers, writers, both


def _prefill_token_s(worker: WorkerSnapshot) -> float:
    budget = worker.step_budget_tokens
    return worker.step_model.batch_s(0, 0, budget, chunk_pairs(0, budget)) / budget
