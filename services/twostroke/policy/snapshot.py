"""What a decision looks at: the request, and every worker and link at the moment of the decision.

What a decision makes anew is not frozen, which would take three times as long; nobody changes it all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from twostroke.policy.step_model import LinearStepModel, StepModel

if TYPE_CHECKING:
    from twostroke.policy.terms import Terms


@dataclass(frozen=True)
class Slo:
    """What a class of requests expects: time to first token, and time between two tokens of an answer."""

    ttft_s: float = 2.0
    itl_s: float = 0.2


DEFAULT_SLO = Slo()

EXPECTED_TOKENS = 128
"""What an answer is taken to have, or to have still, at most: nobody knows."""


def tightest(slos: Mapping[Slo, int], default: Slo) -> Slo:
    """The tightest class of those of which there is any; default where there is none. slos: how many of each."""
    return min(
        (slo for slo, count in slos.items() if count > 0), key=lambda slo: (slo.itl_s, slo.ttft_s), default=default
    )


DEFAULT_STEP_MODEL = LinearStepModel(
    const_s=0.02, per_sequence_s=2e-4, per_context_token_s=1e-7, per_prefill_token_s=2e-4, per_prefill_pair_s=1e-8
)
"""Of a worker of which nothing is known: one mid-size accelerator. Only ratios matter where all workers have it."""


@dataclass(init=False)
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
    pending_prompt_tokens: int
    """Prompt tokens placed here and not yet computed, of prompts queued and running; cached ones are not counted."""
    running_sequences: int
    """Answers being written here, or soon to be."""
    free_blocks: int
    """KV blocks neither in use nor promised to answers whose prompts are still being computed."""
    block_size_tokens: int
    awaited_sequences: int
    """Answers that get a place here when their prompts, which take long, are computed; not among those that run."""
    pending_prompts: int
    """Prompts that pending_prompt_tokens belong to."""
    context_tokens: int
    """Sum of the contexts of running_sequences, prompt and answer so far."""
    total_blocks: int
    """All KV blocks; 0 where not known."""
    promised_long_blocks: int
    """Of the promised blocks, those whose prompts take long to compute (see Limits.long_prompt_s)."""
    step_budget_tokens: int
    """Most tokens that one step computes."""
    max_sequences: int
    """Most sequences that one step runs; 0 is no limit."""
    most_step_s: float
    """How long a step with prompts is to take at most; 0 is no bound."""
    spare_share: float
    """What steps with SPARE_TOKENS of prompts and more take of what they would on the worker's own cores: less than 1
    where they also use cores of others (spare.py)."""
    computes: bool
    """Whether it has something to compute now, so that its cores are nobody else's."""
    lends_to: Sequence[WorkerSnapshot]
    """Those with prompts that use its cores now."""
    slo: Slo
    """The tightest class among what is pending and running here."""
    step_model: StepModel
    """Predicts this worker's step times: fitted on line, or a prior."""
    prefill_token_s: float
    """About what a prompt token takes here (WorkerModel.prefill_token_s), by which a large cluster is looked through
    quickly; 0 lets placement ask step_model."""
    terms: Terms | None = field(init=False, repr=False, compare=False)
    """What costs are made of and only this snapshot decides; filled in by the first decision that looks at it."""

    def __init__(
        self,
        worker: str,
        reads_prompts: bool,
        writes_answers: bool,
        pending_prompt_tokens: int = 0,
        running_sequences: int = 0,
        free_blocks: int = 0,
        block_size_tokens: int = 1,
        pending_prompts: int = 0,
        context_tokens: int = 0,
        total_blocks: int = 0,
        promised_long_blocks: int = 0,
        step_budget_tokens: int = 512,
        max_sequences: int = 0,
        slo: Slo = DEFAULT_SLO,
        step_model: StepModel = DEFAULT_STEP_MODEL,
        prefill_token_s: float = 0.0,
        awaited_sequences: int = 0,
        most_step_s: float = 0.0,
        spare_share: float = 1.0,
        computes: bool = False,
        lends_to: Sequence[WorkerSnapshot] = (),
    ) -> None:
        self.worker = worker
        self.reads_prompts = reads_prompts
        self.writes_answers = writes_answers
        self.pending_prompt_tokens = pending_prompt_tokens
        self.running_sequences = running_sequences
        self.free_blocks = free_blocks
        self.block_size_tokens = block_size_tokens
        self.pending_prompts = pending_prompts
        self.context_tokens = context_tokens
        self.total_blocks = total_blocks
        self.promised_long_blocks = promised_long_blocks
        self.step_budget_tokens = step_budget_tokens
        self.max_sequences = max_sequences
        self.slo = slo
        self.step_model = step_model
        self.prefill_token_s = prefill_token_s
        self.awaited_sequences = awaited_sequences
        self.most_step_s = most_step_s
        self.spare_share = spare_share
        self.computes = computes
        self.lends_to = lends_to
        self.terms = None


@dataclass(frozen=True)
class LinkSnapshot:
    """The way KV takes from one worker to another.

    healthy: takes traffic; a link whose breaker is open or that was not probed yet does not.
    latency_s: from the end of prefill to decode's first step for a hand-off of no bytes: signal, admission, wake-up.
    """

    bytes_per_s: float = 1e9
    latency_s: float = 0.005
    healthy: bool = True


DEFAULT_LINK = LinkSnapshot()
NO_PAIRS: frozenset[tuple[str, str]] = frozenset()
NO_LINKS: Mapping[tuple[str, str], LinkSnapshot] = MappingProxyType({})
NOBODY: frozenset[str] = frozenset()
NOTHING_CACHED: Mapping[str, int] = MappingProxyType({})


@dataclass(init=False)
class ClusterSnapshot:
    """All ready workers, the pairs (prefill, decode) that cannot exchange KV, and the links between the others."""

    workers: Sequence[WorkerSnapshot]
    refused_pairs: frozenset[tuple[str, str]]
    links: Mapping[tuple[str, str], LinkSnapshot]
    """By (prefill, decode); a pair that is missing has default_link."""
    default_link: LinkSnapshot
    kv_bytes_per_token: int
    """KV of one token, all layers; 0 where not known: transfers cost their latency only."""
    streams_kv: bool
    """KV moves while prefill runs, so that only the last chunk's is waited for."""

    def __init__(
        self,
        workers: Sequence[WorkerSnapshot],
        refused_pairs: frozenset[tuple[str, str]] = NO_PAIRS,
        links: Mapping[tuple[str, str], LinkSnapshot] = NO_LINKS,
        default_link: LinkSnapshot = DEFAULT_LINK,
        kv_bytes_per_token: int = 0,
        streams_kv: bool = False,
    ) -> None:
        self.workers = workers
        self.refused_pairs = refused_pairs
        self.links = links
        self.default_link = default_link
        self.kv_bytes_per_token = kv_bytes_per_token
        self.streams_kv = streams_kv


@dataclass(init=False)
class PlacementRequest:
    """What a decision needs to know of a request."""

    prompt_tokens: int
    avoid: frozenset[str]
    """Workers that failed this request already; taken only when there is no other."""
    expected_output_tokens: int
    """Tokens that the answer is expected to have: a guess, at most max_tokens."""
    cached_tokens: Mapping[str, int]
    """Prompt tokens whose KV a worker has, from the start of the prompt (see PrefixIndex); 0 for workers not named."""
    slo: Slo
    deadline_s: float | None
    """Seconds left until the whole answer is due; None for no deadline."""
    priority: int
    """Lower runs earlier."""
    tenant: str
    """Whose share of the cluster this request uses."""

    def __init__(
        self,
        prompt_tokens: int,
        avoid: frozenset[str] = NOBODY,
        expected_output_tokens: int = EXPECTED_TOKENS,
        cached_tokens: Mapping[str, int] = NOTHING_CACHED,
        slo: Slo = DEFAULT_SLO,
        deadline_s: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.avoid = avoid
        self.expected_output_tokens = expected_output_tokens
        self.cached_tokens = cached_tokens
        self.slo = slo
        self.deadline_s = deadline_s
        self.priority = priority
        self.tenant = tenant


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
