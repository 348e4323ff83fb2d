"""What can be done with a request, what it would cost, and what was decided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class Option(Enum):
    """The ways to serve a request, and the two not to serve it now."""

    P_THEN_D = "p_then_d"
    """A prefill worker reads, a decode worker writes."""
    D_ALONE = "d_alone"
    """A decode worker does both, its steps filled with the prompt up to their budget."""
    P_ALONE = "p_alone"
    """A prefill worker does both."""
    LENT_DECODER = "lent_decoder"
    """A decode worker reads in chunks so small that the answers on it keep their time between tokens; then it writes,
    or another decode worker does."""
    WAIT = "wait"
    """Nobody has room; ask again when something changed."""
    REFUSE = "refuse"
    """No way meets the deadline; the client may come back after Plan.retry_after_s."""


@dataclass(frozen=True)
class Options:
    """Which ways are open. Every one is a setting; none changes how the others are judged.

    A worker of role both that is the only one left serves alone, whatever is switched off.
    """

    p_then_d: bool = True
    d_alone: bool = True
    p_alone: bool = True
    lent_decoder: bool = True
    wait: bool = False
    """Whether there is a queue in front of placement. Without one a full worker is better than none."""
    refuse: bool = True


ALL_WAYS = Options()
STRICT = Options(d_alone=False, p_alone=False, lent_decoder=False, refuse=False)
"""Strict disaggregation: always two workers."""
ONE_POOL = Options(p_then_d=False, lent_decoder=False)
"""Every worker serves whole requests."""


@dataclass(frozen=True)
class Weights:
    """How the cost is put together; see docs/placement.md.

    breach: how much more a second over the SLO costs than a second under it.
    lost: cost of an answer that misses its class for the time between tokens, reached at twice the SLO.
    tail: share of an answer's gaps that may exceed the SLO all the same.
    late: cost of being late by as much as the whole deadline.
    prompt_share: share of an answer's steps that are expected to hold prompts too where prompts are ordinary: on
        workers of role prefill and both.
    crowd: what a way is ranked lower by when all places of its writer are taken, and proportionally less before: what
        a batch costs that was never seen is uncertain, and equal workers share the answers.
    refuse_margin: share of the deadline by which every way must be late for a request to be refused: predictions err.
    """

    breach: float = 10.0
    lost: float = 5.0
    tail: float = 0.01
    late: float = 100.0
    prompt_share: float = 0.5
    crowd: float = 0.05
    refuse_margin: float = 0.1


@dataclass(frozen=True)
class Limits:
    """Bounds that no cost moves.

    long_prompt_s: a prompt that takes longer to compute is long.
    long_share: share of a decode worker's blocks that may be promised to long prompts, so that ready ones find room.
    prefill_window_tokens: pending prompt tokens from which on a worker that has any gets no more while Options.wait is
        on, so that the order of prompts is decided in the queue in front; 0 is no bound.
    min_chunk_tokens: the smallest chunk worth a step.
    lent_itl: share of the SLO for the time between tokens that the steps of a lent decoder may take: answers come.
    shortlist: workers per role that are looked at closely.
    """

    long_prompt_s: float = 5.0
    long_share: float = 0.5
    prefill_window_tokens: int = 0
    min_chunk_tokens: int = 16
    lent_itl: float = 0.9
    shortlist: int = 4


@dataclass(init=False)
class Estimate:
    """One way to serve a request, in numbers."""

    option: Option
    prefill: str
    """Who computes the prompt."""
    decode: str
    """Who writes the answer."""
    chunk_tokens: int
    """Most prompt tokens in one step."""
    cached_tokens: int
    """Prompt tokens that need no computing where the prompt is computed."""
    transferred_tokens: int
    """Prompt tokens whose KV crosses a link."""
    queue_s: float
    """Before the prompt's first step."""
    prefill_s: float
    """From the first step to the first token."""
    handoff_s: float
    """What the hand-off adds to the gap between first and second token."""
    ttft_s: float
    itl_s: float
    """Mean time between tokens, the hand-off included."""
    finish_s: float
    """Until the expected end of the answer."""
    own_cost: float
    disturbed_cost: float
    """What it costs the requests that are there already."""
    fits: bool
    """Whether there is KV room and a free place for the answer."""
    avoided: bool
    """Whether it uses a worker that failed this request before."""
    crowding: float
    """By which it is ranked lower, since its writer has answers already; see Weights.crowd."""

    def __init__(
        self,
        option: Option,
        prefill: str,
        decode: str,
        chunk_tokens: int,
        cached_tokens: int,
        transferred_tokens: int,
        queue_s: float,
        prefill_s: float,
        handoff_s: float,
        ttft_s: float,
        itl_s: float,
        finish_s: float,
        own_cost: float,
        disturbed_cost: float,
        fits: bool,
        avoided: bool,
        crowding: float = 0.0,
    ) -> None:
        self.option = option
        self.prefill = prefill
        self.decode = decode
        self.chunk_tokens = chunk_tokens
        self.cached_tokens = cached_tokens
        self.transferred_tokens = transferred_tokens
        self.queue_s = queue_s
        self.prefill_s = prefill_s
        self.handoff_s = handoff_s
        self.ttft_s = ttft_s
        self.itl_s = itl_s
        self.finish_s = finish_s
        self.own_cost = own_cost
        self.disturbed_cost = disturbed_cost
        self.fits = fits
        self.avoided = avoided
        self.crowding = crowding

    @property
    def cost(self) -> float:
        """The one figure by which ways are compared."""
        return self.own_cost + self.disturbed_cost


@dataclass(init=False)
class Plan:
    """The decision.

    prefill: who computes the prompt; None when decode does it itself.
    decode: who writes the answer; empty for WAIT and REFUSE.
    chunk_tokens: most prompt tokens in one step where the prompt is computed; None leaves it to the worker.
    retry_after_s: for REFUSE, when the queues will have drained; None when waiting does not help.
    chosen: its numbers; None for WAIT and REFUSE.
    why: the best of every way that was open, cheapest first.
    """

    prefill: str | None
    decode: str
    option: Option
    chunk_tokens: int | None
    retry_after_s: float | None
    chosen: Estimate | None
    why: Sequence[Estimate]

    def __init__(
        self,
        prefill: str | None,
        decode: str,
        option: Option = Option.P_THEN_D,
        chunk_tokens: int | None = None,
        retry_after_s: float | None = None,
        chosen: Estimate | None = None,
        why: Sequence[Estimate] = (),
    ) -> None:
        self.prefill = prefill
        self.decode = decode
        self.option = option
        self.chunk_tokens = chunk_tokens
        self.retry_after_s = retry_after_s
        self.chosen = chosen
        self.why = why
