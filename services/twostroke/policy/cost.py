"""What a way to serve a request costs: the times it predicts for the request and for those that it disturbs, each as a
multiple of what its SLO class allows."""

from __future__ import annotations

from twostroke.policy.plan import Estimate, Limits, Option, Options, Weights
from twostroke.policy.snapshot import DEFAULT_LINK, LinkSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.spare import backlogs_s
from twostroke.policy.step_model import chunk_pairs
from twostroke.policy.terms import NO_KV, Kv, Reading, Terms, Writing, reading_step_s, terms_of
from twostroke.policy.turns import CERTAIN, passes

MANY = 64
"""Answers of a worker that does not say how many it can write."""


class Costing:
    """Costs ways to serve one request."""

    __slots__ = (
        "_answer_context",
        "_first_share",
        "_gaps",
        "_itl_s",
        "_readings",
        "_rest_share",
        "_slow_share",
        "_tokens",
        "_ttft_s",
        "_writings",
        "limits",
        "options",
        "request",
        "weights",
    )

    def __init__(self, request: PlacementRequest, weights: Weights, limits: Limits, options: Options) -> None:
        self.request = request
        self.weights = weights
        self.limits = limits
        self.options = options
        answer_tokens = request.expected_output_tokens
        self._gaps = gaps = max(0, answer_tokens - 1)
        self._first_share = 1 / gaps if gaps else 0.0
        self._rest_share = (gaps - 1) / gaps if gaps else 0.0
        self._slow_share = min(1.0, weights.prompt_share) * self._rest_share
        self._itl_s, self._ttft_s = request.slo.itl_s, request.slo.ttft_s
        self._answer_context = request.prompt_tokens + answer_tokens / 2
        self._tokens = request.prompt_tokens + answer_tokens
        self._readings: dict[tuple[str, int], Reading] = {}
        self._writings: dict[str, Writing] = {}

    def strain(self, ratio: float) -> float:
        """Cost of a time that is `ratio` times what its SLO allows: steeper beyond 1."""
        return ratio if ratio <= 1 else ratio + self.weights.breach * (ratio - 1)

    def gaps(self, ratio: float, share: float, tails_left: float = 1.0) -> float:
        """Cost of such a share of an answer's gaps, each `ratio` times what its SLO allows: their strain, and the loss
        of the answer's class once they are more than the tail that may exceed it. tails_left: of that tail; 0 for an
        answer that is there, whose tail earlier prompts and later ones take."""
        if ratio <= 1:
            return share * ratio
        weights, over = self.weights, ratio - 1
        cost = share * (ratio + weights.breach * over)
        more = share / weights.tail - tails_left
        if more > 0:
            cost += weights.lost * (over if over < 1 else 1.0) * (more if more < 1 else 1.0)
        return cost

    def wait_s(self, worker: WorkerSnapshot) -> float:
        """Until the prompt's first step on a worker that reads in chunks of its step budget: what is pending there, or
        the step under way where the prompt is so much shorter that it goes first."""
        terms = worker.terms or terms_of(worker)
        pending = worker.pending_prompt_tokens
        return terms.backlog_step_s if pending and self._passes(worker, pending) else terms.backlog_s

    def _passes(self, worker: WorkerSnapshot, pending: int) -> bool:
        request = self.request
        tokens = max(1, request.prompt_tokens - request.cached_tokens.get(worker.worker, 0))
        return passes(tokens, pending, worker.pending_prompts)

    def least_reading(self, wait_s: float) -> float:
        """No way that reads after such a wait costs less."""
        return self.strain(wait_s / self._ttft_s) if wait_s else 0.0

    def least_alone(self, worker: WorkerSnapshot) -> float:
        """No way that reads and writes there costs less: the wait, and the gaps that are longer where prompts come. But
        for rounding, as in least_writing."""
        terms = worker.terms or terms_of(worker)
        least = self.least_reading(self.wait_s(worker))
        if prompt_step_s := terms.prompt_step_s(worker):
            least += self.gaps(prompt_step_s / self._itl_s, self._slow_share)
        return least

    def reading(self, worker: WorkerSnapshot, chunk_tokens: int = 0) -> Reading:
        """The prompt on a worker, in chunks of the worker's step budget unless said otherwise."""
        terms = worker.terms or terms_of(worker)
        chunk_tokens = chunk_tokens or terms.chunk_tokens
        key = (worker.worker, chunk_tokens)
        found = self._readings.get(key)
        if found is None:
            found = self._readings[key] = self._read(worker, terms, chunk_tokens)
        return found

    def _read(self, worker: WorkerSnapshot, terms: Terms, chunk_tokens: int) -> Reading:
        request, name = self.request, worker.worker
        cached, prompt_tokens = request.cached_tokens.get(name, 0), request.prompt_tokens
        if cached >= prompt_tokens:
            cached = prompt_tokens - 1
        tokens, running = prompt_tokens - cached, worker.running_sequences
        shares = chunk_tokens < terms.chunk_tokens and worker.pending_prompt_tokens > 0
        # The oldest prompt has a part of each step for certain (turns.py).
        steps = -(-tokens // (chunk_tokens - chunk_tokens // CERTAIN if shares else chunk_tokens))
        pairs = chunk_pairs(cached, tokens) / steps
        step_s = reading_step_s(worker, -(-tokens // steps), pairs)
        queue_s, run_s = step_s if shares else self.wait_s(worker), steps * step_s
        if queue_s < terms.backlog_s and not shares:
            # What it passes has a part of the step in which it ends.
            run_s += queue_s / CERTAIN
        ttft_s = queue_s + run_s
        ttft_cost = self.strain(ttft_s / self._ttft_s)
        disturbed = self._stalled(worker, terms, steps, step_s) if terms.answers else 0.0
        if self._passes(worker, worker.pending_prompt_tokens):
            disturbed += self._later(worker, terms.backlog_s, terms.backlog_s + steps * step_s)
        for borrower in worker.lends_to:
            disturbed += self._later(borrower, *backlogs_s(borrower, run_s))
        fits = terms.room_tokens >= prompt_tokens and not (
            worker.max_sequences and running + worker.awaited_sequences >= worker.max_sequences
        )
        if self.options.wait and (window := self.limits.prefill_window_tokens):
            pending = worker.pending_prompt_tokens
            fits = fits and not (pending and pending + tokens > window)
        return Reading(
            worker,
            chunk_tokens,
            cached,
            queue_s,
            run_s,
            ttft_s,
            ttft_cost,
            disturbed,
            fits,
            name in request.avoid,
            ttft_cost + disturbed,
        )

    def _later(self, worker: WorkerSnapshot, before_s: float, now_s: float) -> float:
        """Cost to the prompts that are pending on a worker of being computed in now_s instead of in before_s."""
        slo_s = worker.slo.ttft_s
        return worker.pending_prompts * (self.strain(now_s / slo_s) - self.strain(before_s / slo_s))

    def _stalled(self, worker: WorkerSnapshot, terms: Terms, steps: int, step_s: float) -> float:
        """Cost to the answers on a worker of so many steps that also hold a prompt."""
        alone_s, slo_s = terms.alone_s, worker.slo.itl_s
        if step_s <= alone_s:
            return 0.0
        share = steps / (self.request.expected_output_tokens or 1)
        return terms.answers * (self.gaps(step_s / slo_s, share, 0.0) - self.gaps(alone_s / slo_s, share, 0.0))

    def writing(self, worker: WorkerSnapshot) -> Writing:
        """The answer on a worker."""
        found = self._writings.get(worker.worker)
        if found is None:
            found = self._writings[worker.worker] = self._write(worker)
        return found

    def _write(self, worker: WorkerSnapshot) -> Writing:
        request, terms, name = self.request, worker.terms or terms_of(worker), worker.worker
        answers, gaps, prompt_tokens = worker.running_sequences, self._gaps, request.prompt_tokens
        step_s = terms.base_s + terms.slope_s * (worker.context_tokens + self._answer_context)
        rest_s = slow_cost = quick_cost = 0.0
        if gaps:
            if worker.reads_prompts:
                slow, slow_s = self._slow_steps(worker, terms, step_s, 0.0)
                rest_s, slow_cost, quick_cost = self._rest(step_s, slow, slow_s)
            else:
                quick_cost = self.gaps(step_s / self._itl_s, self._rest_share)
        disturbed = self._crowded(worker, terms, step_s) if answers else 0.0
        least_rest = self._rest_share * self.strain(step_s / self._itl_s) if terms.backlog_s else slow_cost + quick_cost
        needed = self._tokens // (worker.block_size_tokens or 1) + 1
        return Writing(
            worker,
            terms,
            step_s,
            max(0, prompt_tokens - request.cached_tokens.get(name, 0)),
            rest_s,
            slow_cost,
            quick_cost,
            disturbed,
            needed,
            needed <= worker.free_blocks
            and (not worker.max_sequences or answers + worker.awaited_sequences < worker.max_sequences),
            name in request.avoid,
            least_rest + disturbed,
        )

    def _crowded(self, worker: WorkerSnapshot, terms: Terms, step_s: float) -> float:
        """Cost to the answers on a worker, and to the prompts that wait there, of one more answer."""
        slo, before_s, breach = worker.slo, terms.alone_s, self.weights.breach
        then, now = step_s / slo.itl_s, before_s / slo.itl_s
        # Strains, as in strain(): here for every decode worker of every decision.
        then = then if then <= 1 else then + breach * (then - 1)
        now = now if now <= 1 else now + breach * (now - 1)
        more = worker.running_sequences * (then - now)
        if backlog_s := terms.backlog_s:
            slower_s = backlog_s * (1 + (step_s - before_s) / terms.backlog_step_s)
            waits = self.strain(slower_s / slo.ttft_s) - self.strain(backlog_s / slo.ttft_s)
            more += max(1, worker.pending_prompts) * waits
        return more

    def lent_chunk_tokens(self, worker: WorkerSnapshot) -> int:
        """The largest chunk that leaves the answers on a worker their time between tokens to the prompt's end; 0 when
        none does, and where it would wait: it passes prompts that are much longer, or that end with the next step."""
        most_s = self.limits.lent_itl * worker.slo.itl_s
        answers, context = max(1, worker.running_sequences), worker.context_tokens

        def step_s(chunk: int) -> float:
            pairs = chunk_pairs(max(0, self.request.prompt_tokens - chunk), chunk)
            return worker.step_model.batch_s(answers, context, chunk, pairs)

        low, high = self.limits.min_chunk_tokens, worker.step_budget_tokens - worker.running_sequences
        if low > high or (low_s := step_s(low)) > most_s:
            return 0
        high_s = step_s(high)
        # Step times are convex in the chunk: what fits below the chord fits.
        chunk = high if high_s <= most_s else low + int((most_s - low_s) / (high_s - low_s) * (high - low))
        pending = worker.pending_prompt_tokens
        return chunk if pending <= chunk or self._passes(worker, pending) else 0

    def estimate(self, option: Option, reading: Reading, writing: Writing, link: LinkSnapshot, kv: Kv) -> Estimate:
        """Both strokes together. link: between the two workers; not looked at where they are one."""
        request, gaps, ttft_s = self.request, self._gaps, reading.ttft_s
        transferred = 0
        handoff_s = itl_s = itl_cost = disturbed = 0.0
        if gaps:
            rest_s, slow_cost, quick_cost = writing.rest_s, writing.rest_slow, writing.rest_quick
            if reading.worker is not writing.worker:
                transferred = writing.missing_tokens
                handoff_s = link.latency_s + kv.exposed_s(transferred, reading, link)
                backlog_s = writing.terms.backlog_s
                if backlog_s > ttft_s:
                    after = (backlog_s - ttft_s) / writing.terms.backlog_step_s
                    slow, slow_s = self._slow_steps(writing.worker, writing.terms, writing.step_s, after)
                    rest_s, slow_cost, quick_cost = self._rest(writing.step_s, slow, slow_s)
            itl_s = writing.step_s + (handoff_s + rest_s) / gaps
            itl_cost = self.first_gap(writing, handoff_s) + slow_cost + quick_cost
            disturbed = writing.disturbed
        finish_s = ttft_s + gaps * itl_s
        own = reading.ttft_cost + itl_cost
        deadline_s = request.deadline_s
        if deadline_s is not None and finish_s > deadline_s:
            own += self.weights.late * (finish_s / max(deadline_s, 1e-3) - 1)
        return Estimate(
            option,
            reading.worker.worker,
            writing.worker.worker,
            reading.chunk_tokens,
            reading.cached_tokens,
            transferred,
            reading.queue_s,
            reading.run_s,
            handoff_s,
            ttft_s,
            itl_s,
            finish_s,
            own,
            reading.disturbed + disturbed,
            writing.fits
            and reading.fits
            and (ttft_s <= self.limits.long_prompt_s or self._may_promise(writing.worker, writing.needed_blocks)),
            reading.avoided or writing.avoided,
            self.weights.crowd * writing.worker.running_sequences / (writing.worker.max_sequences or MANY),
        )

    def alone(self, option: Option, reading: Reading, writing: Writing) -> Estimate:
        """Both strokes on one worker."""
        return self.estimate(option, reading, writing, DEFAULT_LINK, NO_KV)

    def least_writing(self, writing: Writing, handoff_s: float) -> float:
        """No way that writes there costs less than this and the reading's `least` together, if its hand-off takes at
        least handoff_s. But for rounding: at most one part in 1e9."""
        return self.first_gap(writing, handoff_s) + writing.least if self._gaps else 0.0

    def first_gap(self, writing: Writing, handoff_s: float) -> float:
        """Cost of the gap between first and second token."""
        return self.gaps((handoff_s + writing.step_s) / self._itl_s, self._first_share)

    def _slow_steps(
        self, worker: WorkerSnapshot, terms: Terms, step_s: float, backlog_steps: float
    ) -> tuple[float, float]:
        """How many of the answer's steps also hold prompts, and how long such a step takes.

        backlog_steps: those that what is pending there still fills when the answer begins.
        """
        most, prompt_step_s = max(0, self._gaps - 1), terms.prompt_step_s(worker)
        if prompt_step_s:
            backlog_steps += self.weights.prompt_share * most
        return min(backlog_steps, most), max(terms.backlog_step_s, prompt_step_s, step_s)

    def _rest(self, step_s: float, slow: float, slow_s: float) -> tuple[float, float, float]:
        """See Writing.rest_s, rest_slow and rest_quick, for so many slow steps."""
        gaps, slo_s = self._gaps, self._itl_s
        quick_cost = self.gaps(step_s / slo_s, (gaps - 1 - slow) / gaps)
        if not slow:
            return 0.0, 0.0, quick_cost
        return slow * (slow_s - step_s), self.gaps(slow_s / slo_s, slow / gaps), quick_cost

    def _may_promise(self, worker: WorkerSnapshot, needed: int) -> bool:
        """Whether room for the answer to a long prompt may be promised before the prompt is computed."""
        if not worker.total_blocks:
            return True
        promised = worker.promised_long_blocks
        most = max(self.limits.long_share * worker.total_blocks, 0 if promised else worker.total_blocks)
        return promised + needed <= most


def needed_blocks(request: PlacementRequest, worker: WorkerSnapshot) -> int:
    """Blocks that a request's prompt and expected answer take on a worker."""
    return (request.prompt_tokens + request.expected_output_tokens) // max(1, worker.block_size_tokens) + 1
