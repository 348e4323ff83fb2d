"""Which share of a demand would meet its SLO, for a split of the workers into roles.

Closed formulas, good enough to tell splits apart, and fast enough to compare all of them: what exceeds the capacity is
taken to be refused, prompts wait as in an M/G/k queue, and the answers written at once are Poisson distributed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from twostroke.policy.snapshot import Slo
from twostroke.policy.step_model import StepBatch, StepModel, chunk_pairs


class Role(Enum):
    """What routers send to a worker."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Demand:
    """What arrives, as means over some window.

    prompt_tokens: of a prompt, those that need computing. cached_tokens: the others. prompt_cv2: squared coefficient of
    variation of prompt_tokens. answer_tokens: of an answer.
    """

    requests_per_s: float
    prompt_tokens: float
    answer_tokens: float
    slo: Slo
    cached_tokens: float = 0.0
    prompt_cv2: float = 1.0


@dataclass(frozen=True, slots=True)
class Member:
    """A worker as the controller sees it.

    load: anything that orders workers of one role by how much they hold; the least loaded is flipped.
    idle: it holds nothing: no pending prompt, no answer, no hand-off that waits to be fetched.
    """

    worker: str
    role: Role
    step_model: StepModel
    load: float = 0.0
    idle: bool = True
    kv_tokens: int = 0
    """Tokens that its KV memory holds; 0 where not known."""
    step_budget_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Split:
    """How many workers have each role."""

    prefill: int
    decode: int
    both: int

    def __str__(self) -> str:
        parts = (("P", self.prefill), ("D", self.decode), ("both", self.both))
        return " + ".join(f"{count} {name}" for name, count in parts if count) or "none"


def split_of(members: Sequence[Member]) -> Split:
    """How the roles are now."""
    roles = [member.role for member in members]
    return Split(*(roles.count(role) for role in (Role.PREFILL, Role.DECODE, Role.BOTH)))


class Predictor:
    """Predicts for one demand.

    like: a worker whose step model and sizes stand for all; they count as alike.
    """

    def __init__(self, like: Member, demand: Demand) -> None:
        self._like = like
        self._demand = demand
        self._prompt_s = _prompt_s(like, demand, 0)
        self._writing = _Writing.of(like, demand)

    def share(self, split: Split) -> float:
        """Predicted share of requests that are served and meet both parts of their SLO."""
        count = split.prefill + split.decode + split.both
        rate = self._demand.requests_per_s
        if not count or rate <= 0:
            return 1.0
        mixed, share = split.both / count, 0.0
        if split.both:
            share += mixed * self._one_pool(split.both, mixed * rate)
        if split.prefill and split.decode:
            share += (1 - mixed) * self._two_pools(split, (1 - mixed) * rate)
        return share

    def _two_pools(self, split: Split, rate: float) -> float:
        def share(served: float) -> float:
            reads = _reads(split.prefill, served, self._prompt_s, self._demand)
            return reads and reads * self._writing.share(split.decode, served)

        return _best(rate, min(split.prefill / self._prompt_s, split.decode * self._writing.rate), share)

    def _one_pool(self, workers: int, rate: float) -> float:
        """While a prompt is computed answers stall, unless a step full of it fits between two tokens."""
        like, demand, writing = self._like, self._demand, self._writing
        steps = -(-max(1, round(demand.prompt_tokens)) // like.step_budget_tokens)

        def share(served: float) -> float:
            answers = min(writing.most, round(writing.most * served / workers / writing.rate))
            prompt_s = _prompt_s(like, demand, answers)
            stalled = served * prompt_s / workers if prompt_s / steps > demand.slo.itl_s else 0.0
            reads = _reads(workers, served, prompt_s, demand)
            return reads and reads * writing.share(workers, served) * max(0.0, 1 - stalled)

        return _best(rate, workers * min(1 / self._prompt_s, writing.rate), share)


def _best(rate: float, capacity: float, share: Callable[[float], float]) -> float:
    """The largest share of a rate that meets its SLO when what exceeds some use of the capacity is refused."""
    served = {min(rate, capacity * use) for use in (1.0, 0.9, 0.75, 0.5)}
    return max((each / rate * share(each) for each in served if each > 0), default=0.0)


def _context(demand: Demand) -> float:
    """Mean context of an answer while it is written."""
    return demand.prompt_tokens + demand.cached_tokens + demand.answer_tokens / 2


def _prompt_s(like: Member, demand: Demand, sequences: int) -> float:
    """Of a mean prompt, in steps that also hold so many answers."""
    tokens = max(1, round(demand.prompt_tokens))
    steps = -(-tokens // like.step_budget_tokens)
    pairs = chunk_pairs(round(demand.cached_tokens), tokens) / steps
    context = round(sequences * _context(demand))
    return steps * like.step_model.step_s(StepBatch(sequences, context, -(-tokens // steps), pairs, 1))


def _reads(workers: int, rate: float, prompt_s: float, demand: Demand) -> float:
    """Share of prompts whose first token comes in time; waits after Sakasegawa, and Allen and Cunneen."""
    busy, spare_s = rate * prompt_s / workers, demand.slo.ttft_s - prompt_s
    if busy >= 1 or spare_s <= 0:
        return 0.0
    waits = busy ** (math.sqrt(2 * (workers + 1)) - 1)
    mean_s = prompt_s / workers / (1 - busy) * (1 + demand.prompt_cv2) / 2
    return float(1 - waits * math.exp(-spare_s / mean_s))


@dataclass(frozen=True, slots=True)
class _Writing:
    """What one worker can write within the SLO and its memory. most: answers at once. rate: answers per second."""

    most: int
    rate: float

    @staticmethod
    def of(like: Member, demand: Demand) -> _Writing:
        context, slo_s = _context(demand), demand.slo.itl_s

        def step_s(answers: int) -> float:
            base_s, slope_s = like.step_model.decode_terms(answers)
            return base_s + slope_s * answers * context

        low, high = 0, 4096
        if like.kv_tokens:
            high = min(high, int(like.kv_tokens / (context + demand.answer_tokens / 2)))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if step_s(middle) <= slo_s else (low, middle - 1)
        return _Writing(low, low / step_s(low) / max(1.0, demand.answer_tokens) if low else 0.0)

    def share(self, workers: int, rate: float) -> float:
        """Share of time in which so many workers have no more answers than they can write within the SLO."""
        if not self.most:
            return 0.0
        at_once = self.most * rate / self.rate
        deviations = (workers * self.most + 0.5 - at_once) / math.sqrt(at_once)
        return (1 + math.erf(deviations / math.sqrt(2))) / 2
