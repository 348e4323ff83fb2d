"""What costs are made of: each part is worked out once, for all ways to serve a request that share it or, where only
the worker's snapshot decides, for all requests."""

from __future__ import annotations

from twostroke.policy.snapshot import LinkSnapshot, WorkerSnapshot
from twostroke.policy.step_model import chunk_pairs
from twostroke.policy.turns import SPARE_TOKENS, room_within


class Terms:
    """What follows from a worker's snapshot alone; kept in WorkerSnapshot.terms.

    chunk_tokens: of a prompt, what a step has place for. room_tokens: that fit in its free blocks. backlog_s: until the
    prompts pending there are computed; backlog_step_s: one of those steps. answers: that a prompt would stall: a worker
    that writes answers is counted with at least one, which may come while the prompt is computed. alone_s: their step
    without a prompt. base_s, slope_s: decode terms with one more answer.
    """

    __slots__ = (
        "_prompt_step_s",
        "alone_s",
        "answers",
        "backlog_s",
        "backlog_step_s",
        "base_s",
        "chunk_tokens",
        "room_tokens",
        "slope_s",
    )

    def __init__(self, worker: WorkerSnapshot) -> None:
        model, running, context = worker.step_model, worker.running_sequences, worker.context_tokens
        self.chunk_tokens = chunk = max(1, worker.step_budget_tokens - running)
        self.room_tokens = worker.free_blocks * worker.block_size_tokens
        self.answers = answers = max(running, int(worker.writes_answers))
        self.alone_s = self.backlog_s = self.backlog_step_s = 0.0
        self._prompt_step_s = -1.0
        if answers:
            base_s, slope_s = model.decode_terms(answers)
            self.alone_s = base_s + slope_s * context
        self.base_s, self.slope_s = model.decode_terms(running + 1)
        tokens, prompts = worker.pending_prompt_tokens, max(1, worker.pending_prompts)
        if most_s := worker.most_step_s:
            # A half of each is computed in the mean.
            depth = tokens // prompts // 2
            own_s = most_s / worker.spare_share
            self.chunk_tokens = chunk = max(1, room_within(own_s, chunk, model, running, context, depth))
        if tokens > 0:
            steps = -(-tokens // chunk)
            pairs = prompts * chunk_pairs(0, -(-tokens // prompts)) / steps
            self.backlog_step_s = reading_step_s(worker, -(-tokens // steps), pairs)
            self.backlog_s = steps * self.backlog_step_s

    def prompt_step_s(self, worker: WorkerSnapshot) -> float:
        """A step full of a prompt, with one more answer, where prompts come in the ordinary course; else 0."""
        if self._prompt_step_s < 0:
            self._prompt_step_s = 0.0
            if worker.reads_prompts:
                pairs = chunk_pairs(self.chunk_tokens, self.chunk_tokens)
                answers, context_tokens = worker.running_sequences + 1, worker.context_tokens
                self._prompt_step_s = worker.step_model.batch_s(answers, context_tokens, self.chunk_tokens, pairs)
        return self._prompt_step_s


def terms_of(worker: WorkerSnapshot) -> Terms:
    """A worker's, kept with it."""
    terms = worker.terms
    if terms is None:
        terms = worker.terms = Terms(worker)
    return terms


def reading_step_s(worker: WorkerSnapshot, tokens: int, pairs: float) -> float:
    """A step with so much of a prompt, and with all answers that are there."""
    step_s = worker.step_model.batch_s(worker.running_sequences, worker.context_tokens, tokens, pairs)
    return step_s * worker.spare_share if tokens >= SPARE_TOKENS else step_s


class Reading:
    """Computing the prompt on one worker."""

    __slots__ = (
        "avoided",
        "cached_tokens",
        "chunk_tokens",
        "disturbed",
        "fits",
        "least",
        "queue_s",
        "run_s",
        "ttft_cost",
        "ttft_s",
        "worker",
    )

    worker: WorkerSnapshot
    chunk_tokens: int
    cached_tokens: int
    queue_s: float
    run_s: float
    """From the first step to the first token."""
    ttft_s: float
    ttft_cost: float
    disturbed: float
    fits: bool
    avoided: bool
    least: float
    """No way that reads here costs less, whoever writes."""

    def __init__(
        self,
        worker: WorkerSnapshot,
        chunk_tokens: int,
        cached_tokens: int,
        queue_s: float,
        run_s: float,
        ttft_s: float,
        ttft_cost: float,
        disturbed: float,
        fits: bool,
        avoided: bool,
        least: float,
    ) -> None:
        self.worker = worker
        self.chunk_tokens = chunk_tokens
        self.cached_tokens = cached_tokens
        self.queue_s = queue_s
        self.run_s = run_s
        self.ttft_s = ttft_s
        self.ttft_cost = ttft_cost
        self.disturbed = disturbed
        self.fits = fits
        self.avoided = avoided
        self.least = least


class Writing:
    """Writing the answer on one worker."""

    __slots__ = (
        "avoided",
        "disturbed",
        "fits",
        "least",
        "missing_tokens",
        "needed_blocks",
        "rest_quick",
        "rest_s",
        "rest_slow",
        "step_s",
        "terms",
        "worker",
    )

    worker: WorkerSnapshot
    terms: Terms
    step_s: float
    """With this answer in the batch and no prompt."""
    missing_tokens: int
    """Of the prompt, those whose KV is not here."""
    rest_s: float
    """What the prompts that come in the ordinary course add to the answer's gaps after the first, all together."""
    rest_slow: float
    rest_quick: float
    """Cost of the answer's gaps after the first: of those with prompts in their steps, and of the others."""
    disturbed: float
    needed_blocks: int
    fits: bool
    avoided: bool
    least: float
    """No way that writes here costs less after the first gap, whoever reads."""

    def __init__(
        self,
        worker: WorkerSnapshot,
        terms: Terms,
        step_s: float,
        missing_tokens: int,
        rest_s: float,
        rest_slow: float,
        rest_quick: float,
        disturbed: float,
        needed_blocks: int,
        fits: bool,
        avoided: bool,
        least: float,
    ) -> None:
        self.worker = worker
        self.terms = terms
        self.step_s = step_s
        self.missing_tokens = missing_tokens
        self.rest_s = rest_s
        self.rest_slow = rest_slow
        self.rest_quick = rest_quick
        self.disturbed = disturbed
        self.needed_blocks = needed_blocks
        self.fits = fits
        self.avoided = avoided
        self.least = least


class Kv:
    """How KV moves. bytes_per_token: all layers; streams: it moves while prefill runs."""

    __slots__ = ("bytes_per_token", "streams")

    def __init__(self, bytes_per_token: int, streams: bool) -> None:
        self.bytes_per_token = bytes_per_token
        self.streams = streams

    def exposed_s(self, tokens: int, reading: Reading, link: LinkSnapshot) -> float:
        """What is left to transfer when prefill has ended."""
        per_token_s = self.bytes_per_token / link.bytes_per_s
        if not self.streams:
            return tokens * per_token_s
        last_s = min(tokens, reading.chunk_tokens) * per_token_s
        return max(last_s, tokens * per_token_s - reading.run_s)

    def least_s(self, tokens: int, chunk_tokens: int, link: LinkSnapshot) -> float:
        """What exposed_s gives at least for a prompt read in chunks of at least chunk_tokens."""
        return (min(tokens, chunk_tokens) if self.streams else tokens) * (self.bytes_per_token / link.bytes_per_s)


NO_KV = Kv(0, False)
