"""What every worker's steps take: its own prior at first, then learned from the steps that its load reports tell of.

A decode worker may never see a prompt, nor a prefill worker an answer: of such steps it is believed what was learned
of a worker that expects the same of itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from twostroke.policy.perf_model import WITH_PROMPT, WITHOUT_PROMPT, WorkerModel
from twostroke.policy.snapshot import WorkerSnapshot
from twostroke.policy.step_model import LinearStepModel, StepBatch
from twostroke.v1.worker_pb2 import GetInfoResponse, StepCosts, StepSample, WatchLoadResponse

EAGER_STEPS = 100
"""Up to so many steps a worker is learned without pause."""
PAUSE_S, PAUSE_PER_WORKER_S = 0.5, 0.02
"""Between two reports of a worker that are learned from, after that: a step costs the router 70 us."""
SURE_STEPS = 14
"""Steps after which predictions are good enough to turn a request away for them."""
LEAST_PROMPT_TOKENS = 32
"""Of a step that teaches something of prompts. Decode computes the last few tokens of every prompt that it fetches."""
QUICK_TOKENS = 512


@dataclass(slots=True)
class _Known:
    prior: LinearStepModel
    model: WorkerModel
    learned_s: float = float("-inf")


class StepModels:
    """By the workers' addresses. All moments are of the monotonic clock."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._teachers: dict[tuple[LinearStepModel, int], str] = {}
        """By prior and kind of step: of whom the others believe it."""

    def meet(self, address: str, info: GetInfoResponse) -> None:
        """A worker described itself. What was learned in an earlier life at its address stays true of one that expects
        the same of itself."""
        prior, known = _prior(info.prior_costs), self._known.get(address)
        if known is None or known.prior != prior:
            self.forget(address)
            self._known[address] = _Known(prior, WorkerModel(prior))

    def forget(self, address: str) -> None:
        """A worker is no longer named."""
        self._known.pop(address, None)
        self._teachers = {kind: teacher for kind, teacher in self._teachers.items() if teacher != address}

    def learn(self, address: str, load: WatchLoadResponse, now_s: float) -> Collection[str]:
        """Takes the steps of a report, or passes over them. Returns of which workers predictions changed."""
        known = self._known.get(address)
        if known is None or not load.step_samples:
            return ()
        pause_s = max(PAUSE_S, PAUSE_PER_WORKER_S * len(self._known))
        if known.model.steps >= EAGER_STEPS and now_s - known.learned_s < pause_s:
            return ()
        known.learned_s = now_s
        for sample in load.step_samples:
            if not 0 < sample.prefill_tokens < LEAST_PROMPT_TOKENS:
                known.model.observe(_batch(sample), sample.duration_ms / 1000, sample.spared_ms / 1000)
        changed = {address}
        for kind in (WITHOUT_PROMPT, WITH_PROMPT):
            if known.model.knows(kind) and self._teachers.setdefault((known.prior, kind), address) == address:
                changed.update(self._pupils(known.prior, kind))
        return changed

    def _pupils(self, prior: LinearStepModel, kind: int) -> list[str]:
        return [each for each, known in self._known.items() if known.prior == prior and not known.model.knows(kind)]

    def put_into(self, facts: WorkerSnapshot) -> WorkerSnapshot:
        """A worker with what is predicted of its steps."""
        model = self.predicted(facts.worker)
        if model is None:
            return facts
        chunk = StepBatch(0, 0, QUICK_TOKENS, QUICK_TOKENS * QUICK_TOKENS / 2, 1)
        prefill_token_s = model.step_s(chunk) / QUICK_TOKENS
        known = self._known[facts.worker]
        taught = None if known.model.knows(WITH_PROMPT) else self._taught(known.prior, WITH_PROMPT)
        share = (taught or known.model).spare_share
        return replace(facts, step_model=model, prefill_token_s=prefill_token_s, spare_share=share)

    def predicted(self, address: str) -> LinearStepModel | None:
        """What is predicted of a worker's steps; None for one that has not described itself."""
        known = self._known.get(address)
        if known is None:
            return None
        own = known.model.model
        if not known.model.knows(WITH_PROMPT) and (taught := self._taught(known.prior, WITH_PROMPT)):
            other = taught.model
            return replace(
                own,
                per_prefill_token_s=other.per_prefill_token_s,
                per_prefill_pair_s=other.per_prefill_pair_s,
                per_prefill_chunk_s=other.per_prefill_chunk_s,
            )
        if not known.model.knows(WITHOUT_PROMPT) and (taught := self._taught(known.prior, WITHOUT_PROMPT)):
            other = taught.model
            return replace(
                own,
                const_s=other.const_s,
                per_sequence_s=other.per_sequence_s,
                per_context_token_s=other.per_context_token_s,
                # Steps with a prompt, of which it knows, stay what they are.
                per_prefill_chunk_s=max(0.0, own.per_prefill_chunk_s + own.const_s - other.const_s),
            )
        return own

    def _taught(self, prior: LinearStepModel, kind: int) -> WorkerModel | None:
        teacher = self._teachers.get((prior, kind))
        return self._known[teacher].model if teacher is not None else None

    def sure(self, address: str) -> bool:
        """Whether the predictions rest on what was seen."""
        known = self._known.get(address)
        return known is not None and known.model.steps >= SURE_STEPS

    def all(self) -> Mapping[str, WorkerModel]:
        """What was learned of each worker, by address."""
        return {address: known.model for address, known in self._known.items()}


def _batch(sample: StepSample) -> StepBatch:
    return StepBatch(
        sample.sequences,
        sample.context_tokens,
        sample.prefill_tokens,
        sample.prefill_pairs,
        sample.prefill_chunks,
    )


def _prior(costs: StepCosts) -> LinearStepModel:
    return LinearStepModel(
        costs.const_s,
        costs.per_sequence_s,
        costs.per_context_token_s,
        costs.per_prefill_token_s,
        costs.per_prefill_pair_s,
        costs.per_prefill_chunk_s,
    )
