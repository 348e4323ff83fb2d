"""What a decision looks at: the request, and every worker and link at the moment of the decision.

What a decision makes anew is not frozen, which would take three times as long; nobody changes it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from twostroke.policy.step_model import LinearStepModel, StepModel

if TYPE_CHECKING:
    from twostroke.policy.terms import Terms


@dataclass(frozen=True, slots=True)
class Slo:
    """What a class of requests expects: time to first token, and time between two tokens of an answer."""

    ttft_s: float = 2.0
    itl_s: float = 0.2


DEFAULT_SLO = Slo()

DEFAULT_STEP_MODEL: StepModel = LinearStepModel(
    const_s=0.02, per_sequence_s=2e-4, per_context_token_s=1e-7, per_prefill_token_s=2e-4, per_prefill_pair_s=1e-8
)
"""Of a worker of which nothing is known: one mid-size accelerator. Only ratios matter where all workers have it."""


@dataclass(slots=True)
class WorkerSnapshot:
    """A worker at the moment of the decision. Only ready workers, which do not drain, are in a snapshot.

    Work that was placed and that the worker has not reported yet is counted in all of it (see InFlight).
    """

    worker: str
    """Key of the worker."""
    reads_prompts: bool
    """Role prefill or both: prompts are sent here in the ordinary course."""
    writes_answers: bool
    """Role decode or both: answers are written here in the ordinary course."""
    pending_prompt_tokens: int = 0
    """Prompt tokens placed here and not yet computed, of prompts queued and running; cached ones are not counted."""
    running_sequences: int = 0
    """Answers being written here, or admitted for it."""
    free_blocks: int = 0
    """KV blocks neither in use nor promised to answers whose prompts are still being computed."""
    block_size_tokens: int = 1
    pending_prompts: int = 0
    """Prompts that pending_prompt_tokens belong to."""
    context_tokens: int = 0
    """Sum of the contexts of running_sequences, prompt and answer so far."""
    total_blocks: int = 0
    """All KV blocks; 0 where not known."""
    promised_long_blocks: int = 0
    """Of the promised blocks, those whose prompts take long to compute (see Limits.long_prompt_s)."""
    step_budget_tokens: int = 512
    """Most tokens that one step computes."""
    max_sequences: int = 0
    """Most sequences that one step runs; 0 is no limit."""
    slo: Slo = DEFAULT_SLO
    """The tightest class among what is pending and running here."""
    step_model: StepModel = DEFAULT_STEP_MODEL
    """Predicts this worker's step times: fitted on line, or a prior."""
    prefill_token_s: float = 0.0
    """About what a prompt token takes here (WorkerModel.prefill_token_s), by which a large cluster is looked through
    quickly; 0 lets placement ask step_model."""
    terms: Terms | None = field(default=None, init=False, repr=False, compare=False)
    """What costs are made of and only this snapshot decides; filled in by the first decision that looks at it."""


@dataclass(frozen=True, slots=True)
class LinkSnapshot:
    """The way KV takes from one worker to another.

    healthy: takes traffic; a link whose breaker is open or that was not probed yet does not.
    latency_s: from the end of prefill to decode's first step for a hand-off of no bytes: signal, admission, wake-up.
    """

    bytes_per_s: float = 1e9
    latency_s: float = 0.005
    healthy: bool = True


DEFAULT_LINK = LinkSnapshot()


@dataclass(slots=True)
class ClusterSnapshot:
    """All ready workers, the pairs (prefill, decode) that cannot exchange KV, and the links between the others."""

    workers: Sequence[WorkerSnapshot]
    refused_pairs: frozenset[tuple[str, str]] = frozenset()
    links: Mapping[tuple[str, str], LinkSnapshot] = field(default_factory=dict)
    """By (prefill, decode); a pair that is missing has default_link."""
    default_link: LinkSnapshot = DEFAULT_LINK
    kv_bytes_per_token: int = 0
    """KV of one token, all layers; 0 where not known: transfers cost their latency only."""
    streams_kv: bool = False
    """KV moves while prefill runs, so that only the last chunk's is waited for."""


@dataclass(slots=True)
class PlacementRequest:
    """What a decision needs to know of a request."""

    prompt_tokens: int
    avoid: frozenset[str] = frozenset()
    """Workers that failed this request already; taken only when there is no other."""
    expected_output_tokens: int = 128
    """Tokens that the answer is expected to have: a guess, at most max_tokens."""
    cached_tokens: Mapping[str, int] = field(default_factory=dict)
    """Prompt tokens whose KV a worker has, from the start of the prompt (see PrefixIndex); 0 for workers not named."""
    slo: Slo = DEFAULT_SLO
    deadline_s: float | None = None
    """Seconds left until the whole answer is due; None for no deadline."""
    priority: int = 0
    """Lower runs earlier."""
    tenant: str = ""
    """Whose share of the cluster this request uses."""


def with_prompt_on(source: str, snapshot: ClusterSnapshot, tried: Iterable[str] = ()) -> ClusterSnapshot:
    """The cluster for an answer whose prompt a worker has taken already. tried: those that are not to write it."""
    workers = [
        replace(worker, reads_prompts=True, pending_prompt_tokens=0, free_blocks=worker.total_blocks)
        if worker.worker == source
        else replace(worker, reads_prompts=False)
        for worker in snapshot.workers
    ]
    refused = snapshot.refused_pairs | {(source, worker) for worker in tried}
    return replace(snapshot, workers=workers, refused_pairs=refused)
