"""What a way to serve a request costs: the times it predicts for the request and for those that it disturbs, each as a
multiple of what its SLO class allows."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from twostroke.policy.plan import Estimate, Limits, Option, Options, Weights
from twostroke.policy.snapshot import DEFAULT_LINK, LinkSnapshot, PlacementRequest, WorkerSnapshot
from twostroke.policy.step_model import StepBatch, chunk_pairs

MANY = 64
"""Answers of a worker that does not say how many it can write."""


@dataclass(slots=True)
class Reading:
    """Computing the prompt on one worker."""

    worker: WorkerSnapshot
    chunk_tokens: int
    cached_tokens: int
    queue_s: float
    steps: int
    step_s: float
    """With a chunk of this prompt and the answers that run there."""
    disturbed: float
    fits: bool
    avoided: bool

    @property
    def run_s(self) -> float:
        """From the first step to the first token."""
        return self.steps * self.step_s


@dataclass(slots=True)
class Writing:
    """Writing the answer on one worker."""

    worker: WorkerSnapshot
    step_s: float
    """With this answer in the batch and no prompt."""
    backlog_s: float
    """How long prompts that are pending there will go on to fill its steps."""
    backlog_step_s: float
    """A step while they do."""
    prompt_step_s: float
    """A step full of a prompt, where prompts come in the ordinary course; else 0."""
    disturbed: float
    fits: bool
    avoided: bool


@dataclass(slots=True)
class Costing:
    """Costs ways to serve one request."""

    request: PlacementRequest
    weights: Weights
    limits: Limits
    options: Options
    _writings: dict[str, Writing] = field(default_factory=dict)

    def strain(self, ratio: float) -> float:
        """Cost of a time that is `ratio` times what its SLO allows: steeper beyond 1."""
        return ratio if ratio <= 1 else ratio + self.weights.breach * (ratio - 1)

    def gaps(self, ratio: float, share: float) -> float:
        """Cost of such a share of an answer's gaps, each `ratio` times what its SLO allows: their strain, and the loss
        of the answer's class once they are more than the tail that may exceed it."""
        cost = share * self.strain(ratio)
        tail = self.weights.tail
        if ratio > 1 and share > tail:
            cost += self.weights.lost * min(1.0, ratio - 1) * min(1.0, share / tail - 1)
        return cost

    def reading(self, worker: WorkerSnapshot, chunk_tokens: int = 0) -> Reading:
        """The prompt on a worker, in chunks of the worker's step budget unless said otherwise."""
        request = self.request
        chunk_tokens = chunk_tokens or max(1, worker.step_budget_tokens - worker.running_sequences)
        cached = min(request.cached_tokens.get(worker.worker, 0), request.prompt_tokens - 1)
        tokens = request.prompt_tokens - cached
        steps = -(-tokens // chunk_tokens)
        sequences, context = worker.running_sequences, worker.context_tokens
        step_s = worker.step_model.step_s(
            StepBatch(sequences, context, -(-tokens // steps), chunk_pairs(cached, tokens) / steps, 1)
        )
        queue_s = _backlog(worker)[0]
        pending = worker.pending_prompt_tokens
        window = self.limits.prefill_window_tokens if self.options.wait else 0
        return Reading(
            worker,
            chunk_tokens,
            cached,
            queue_s,
            steps,
            step_s,
            self._stalled(worker, steps, step_s),
            worker.free_blocks * worker.block_size_tokens >= request.prompt_tokens
            and not (worker.max_sequences and sequences >= worker.max_sequences)
            and not (window and pending and pending + tokens > window),
            worker.worker in request.avoid,
        )

    def _stalled(self, worker: WorkerSnapshot, steps: int, step_s: float) -> float:
        """Cost to the answers on a worker of so many steps that also hold a prompt.

        A worker that writes answers is counted with at least one: it may come while the prompt is computed.
        """
        answers = max(worker.running_sequences, int(worker.writes_answers))
        if not answers:
            return 0.0
        base_s, slope_s = worker.step_model.decode_terms(answers)
        alone_s = base_s + slope_s * worker.context_tokens
        share = steps / max(1, self.request.expected_output_tokens)
        before, then = alone_s / worker.slo.itl_s, max(step_s, alone_s) / worker.slo.itl_s
        return answers * max(0.0, self.gaps(then, share) - self.gaps(before, share))

    def writing(self, worker: WorkerSnapshot) -> Writing:
        """The answer on a worker."""
        if worker.worker not in self._writings:
            self._writings[worker.worker] = self._write(worker)
        return self._writings[worker.worker]

    def _write(self, worker: WorkerSnapshot) -> Writing:
        request = self.request
        answers, context = worker.running_sequences, worker.context_tokens
        model, slo = worker.step_model, worker.slo
        base_s, slope_s = model.decode_terms(answers + 1)
        step_s = base_s + slope_s * (context + request.prompt_tokens + request.expected_output_tokens / 2)
        backlog_s, backlog_step_s = _backlog(worker)
        prompt_step_s = disturbed = 0.0
        if worker.reads_prompts:
            chunk = max(1, worker.step_budget_tokens - answers)
            prompt_step_s = model.step_s(StepBatch(answers + 1, context, chunk, chunk_pairs(chunk, chunk), 1))
        if answers:
            base_s, slope_s = model.decode_terms(answers)
            before_s = base_s + slope_s * context
            disturbed = answers * (self.strain(step_s / slo.itl_s) - self.strain(before_s / slo.itl_s))
            if backlog_s:
                slower_s = backlog_s * (1 + (step_s - before_s) / backlog_step_s)
                more = self.strain(slower_s / slo.ttft_s) - self.strain(backlog_s / slo.ttft_s)
                disturbed += max(1, worker.pending_prompts) * more
        return Writing(
            worker,
            step_s,
            backlog_s,
            backlog_step_s,
            prompt_step_s,
            disturbed,
            needed_blocks(request, worker) <= worker.free_blocks
            and (not worker.max_sequences or answers < worker.max_sequences),
            worker.worker in request.avoid,
        )

    def lent_chunk_tokens(self, worker: WorkerSnapshot) -> int:
        """The largest chunk that leaves the answers on a worker their time between tokens to the prompt's end; 0 when
        none does, and when the worker is lent already."""
        if worker.pending_prompt_tokens:
            return 0
        most_s = self.limits.lent_itl * worker.slo.itl_s
        answers, context = max(1, worker.running_sequences), worker.context_tokens

        def step_s(chunk: int) -> float:
            pairs = chunk_pairs(max(0, self.request.prompt_tokens - chunk), chunk)
            return worker.step_model.step_s(StepBatch(answers, context, chunk, pairs, 1))

        low, high = self.limits.min_chunk_tokens, worker.step_budget_tokens - worker.running_sequences
        if low > high or (low_s := step_s(low)) > most_s:
            return 0
        if (high_s := step_s(high)) <= most_s:
            return high
        # Step times are convex in the chunk: what fits below the chord fits.
        return low + int((most_s - low_s) / (high_s - low_s) * (high - low))

    def estimate(self, option: Option, reading: Reading, writing: Writing, link: LinkSnapshot, kv: Kv) -> Estimate:
        """Both strokes together. link: between the two workers; not looked at where they are one."""
        request, slo = self.request, self.request.slo
        ttft_s = reading.queue_s + reading.run_s
        gaps = max(0, request.expected_output_tokens - 1)
        hop = reading.worker is not writing.worker
        transferred = 0
        handoff_s = 0.0
        if hop and gaps:
            transferred = request.prompt_tokens - min(
                request.cached_tokens.get(writing.worker.worker, 0), request.prompt_tokens
            )
            handoff_s = link.latency_s + kv.exposed_s(transferred, reading, link)
        slow, slow_s = self._slow_steps(writing, ttft_s if hop else math.inf, max(0, gaps - 1))
        itl_s = finish_s = itl_cost = 0.0
        if gaps:
            step_s = writing.step_s
            itl_s = step_s + (handoff_s + slow * (slow_s - step_s)) / gaps
            itl_cost = (
                self.gaps((handoff_s + step_s) / slo.itl_s, 1 / gaps)
                + self.gaps(slow_s / slo.itl_s, slow / gaps)
                + self.gaps(step_s / slo.itl_s, (gaps - 1 - slow) / gaps)
            )
        finish_s = ttft_s + gaps * itl_s
        own = self.strain(ttft_s / slo.ttft_s) + itl_cost
        if request.deadline_s is not None and finish_s > request.deadline_s:
            own += self.weights.late * (finish_s / max(request.deadline_s, 1e-3) - 1)
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
            reading.disturbed + (writing.disturbed if gaps else 0.0),
            writing.fits and reading.fits and self._may_promise(reading, writing),
            reading.avoided or writing.avoided,
            self.weights.crowd * writing.worker.running_sequences / (writing.worker.max_sequences or MANY),
        )

    def alone(self, option: Option, reading: Reading, writing: Writing) -> Estimate:
        """Both strokes on one worker."""
        return self.estimate(option, reading, writing, DEFAULT_LINK, NO_KV)

    def _slow_steps(self, writing: Writing, after_s: float, most: int) -> tuple[float, float]:
        """How many of the answer's steps also hold prompts, and how long such a step takes.

        after_s: from when on; what was pending before the request's own prompt on the same worker is over by then.
        """
        steps = 0.0
        if writing.backlog_s > after_s:
            steps = (writing.backlog_s - after_s) / writing.backlog_step_s
        if writing.prompt_step_s:
            steps += self.weights.prompt_share * most
        return min(steps, most), max(writing.backlog_step_s, writing.prompt_step_s, writing.step_s)

    def _may_promise(self, reading: Reading, writing: Writing) -> bool:
        """Whether the answer's room may be promised before its prompt is computed."""
        worker = writing.worker
        if not worker.total_blocks or reading.queue_s + reading.run_s <= self.limits.long_prompt_s:
            return True
        promised = worker.promised_long_blocks
        most = max(self.limits.long_share * worker.total_blocks, 0 if promised else worker.total_blocks)
        return promised + needed_blocks(self.request, worker) <= most


@dataclass(frozen=True, slots=True)
class Kv:
    """How KV moves. bytes_per_token: all layers; streams: it moves while prefill runs."""

    bytes_per_token: int
    streams: bool

    def exposed_s(self, tokens: int, reading: Reading, link: LinkSnapshot) -> float:
        """What is left to transfer when prefill has ended."""
        per_token_s = self.bytes_per_token / link.bytes_per_s
        if not self.streams:
            return tokens * per_token_s
        last_s = min(tokens, reading.chunk_tokens) * per_token_s
        return max(last_s, tokens * per_token_s - reading.run_s)


NO_KV = Kv(0, False)


def needed_blocks(request: PlacementRequest, worker: WorkerSnapshot) -> int:
    """Blocks that a request's prompt and expected answer take on a worker."""
    return (request.prompt_tokens + request.expected_output_tokens) // max(1, worker.block_size_tokens) + 1


def _backlog(worker: WorkerSnapshot) -> tuple[float, float]:
    """(seconds until the prompts pending on a worker are computed, seconds of one of those steps)."""
    tokens = worker.pending_prompt_tokens
    if tokens <= 0:
        return 0.0, 0.0
    steps = -(-tokens // max(1, worker.step_budget_tokens - worker.running_sequences))
    prompts = max(1, worker.pending_prompts)
    pairs = prompts * chunk_pairs(0, -(-tokens // prompts)) / steps
    step_s = worker.step_model.step_s(
        StepBatch(worker.running_sequences, worker.context_tokens, -(-tokens // steps), pairs, 1)
    )
    return steps * step_s, step_s
