"""Which worker reads a prompt and which one writes the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from twostroke.errors import NoWorkerError


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """A worker at the moment of the decision. Only ready workers are in a snapshot."""

    worker: str
    """Key of the worker."""
    reads_prompts: bool
    writes_answers: bool
    pending_prompt_tokens: int = 0
    """Prompt tokens placed here and not yet computed."""
    running_sequences: int = 0
    """Answers being written here, or admitted for it."""
    free_blocks: int = 0
    block_size_tokens: int = 1


@dataclass(frozen=True, slots=True)
class ClusterSnapshot:
    """All ready workers, and the pairs (prefill, decode) that cannot exchange KV."""

    workers: Sequence[WorkerSnapshot]
    refused_pairs: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What a decision needs to know of a request."""

    prompt_tokens: int
    avoid: frozenset[str] = field(default_factory=frozenset)
    """Workers that failed this request already; taken only when there is no other."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The decision. prefill is None when decode computes the prompt itself."""

    prefill: str | None
    decode: str


def place(request: PlacementRequest, snapshot: ClusterSnapshot) -> Plan:
    """The least loaded pair: fewest prompt tokens ahead on prefill, then fewest answers and most room on decode.

    A worker that does both alone is chosen when no pair of two workers exists. Raises NoWorkerError.
    """
    pairs = [
        (prefill, decode)
        for prefill in snapshot.workers
        if prefill.reads_prompts
        for decode in snapshot.workers
        if decode.writes_answers and (prefill.worker, decode.worker) not in snapshot.refused_pairs
    ]
    if not pairs:
        raise NoWorkerError(
            "no prefill worker and decode worker that can exchange KV are ready; see `twostroke status`"
        )
    prefill, decode = min(pairs, key=lambda pair: _rank(request, *pair))
    if prefill.worker == decode.worker:
        return Plan(None, decode.worker)
    return Plan(prefill.worker, decode.worker)


def _rank(request: PlacementRequest, prefill: WorkerSnapshot, decode: WorkerSnapshot) -> tuple[object, ...]:
    needed = request.prompt_tokens // max(1, decode.block_size_tokens) + 1
    return (
        prefill.worker in request.avoid or decode.worker in request.avoid,
        prefill.worker == decode.worker,
        decode.free_blocks < needed,
        prefill.pending_prompt_tokens,
        decode.running_sequences,
        -decode.free_blocks,
        prefill.worker,
        decode.worker,
    )
