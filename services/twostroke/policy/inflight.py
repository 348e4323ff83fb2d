"""What this router has placed and the workers have not reported yet, so that two requests in one millisecond do not
both find the same worker idle, and no prompt is computed whose answer has nowhere to go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from twostroke.policy.cost import needed_blocks
from twostroke.policy.placement import DEFAULT_LIMITS
from twostroke.policy.plan import Limits, Plan
from twostroke.policy.snapshot import DEFAULT_SLO, PlacementRequest, Slo, WorkerSnapshot, tightest

REPORT_LAG_S = 0.05
"""A report is taken not to know of what happened so shortly before it came."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker says about its load."""

    pending_prompt_tokens: int
    """Not yet computed, of prompts queued and running."""
    pending_prompts: int
    used_blocks: int
    running_sequences: int


@dataclass(slots=True)
class _Worker:
    facts: WorkerSnapshot
    report: Report | None = None
    reading: int = 0
    writing: int = 0
    awaited: int = 0
    """Answers whose prompts take long and are not computed yet."""
    to_come: int = 0
    """Of those that it is writing, the answers whose prompts others compute still."""
    context_tokens: int = 0
    promised_blocks: int = 0
    promised_long_blocks: int = 0
    growth_tokens: int = 0
    """What the answers being written are expected to grow by."""
    unseen: dict[str, float] = field(default_factory=dict)
    """Prompts placed here since about the last report, with the moment."""
    arrived: dict[str, float] = field(default_factory=dict)
    """Answers whose KV came since about the last report, with the moment; still promised for."""
    slos: Counter[Slo] = field(default_factory=Counter)
    snapshot: WorkerSnapshot | None = None


@dataclass(slots=True)
class _Request:
    reader: _Worker
    writer: _Worker
    slo: Slo
    read_tokens: int
    read_blocks: int
    write_blocks: int
    long: bool
    context_tokens: int
    growth_tokens: int
    """What is left of its expected length."""
    reading: bool = True
    promised: bool = True

    @property
    def awaited(self) -> bool:
        """Whether it takes long until it is one of those that its writer writes."""
        return self.long and self.reading


class InFlight:
    """Everything that one router has in flight, by worker. Ids that are unknown or over are ignored, so that whoever
    learns of an end may say so.

    slo: the class of what may come to a worker that has nothing.
    """

    def __init__(self, limits: Limits = DEFAULT_LIMITS, slo: Slo = DEFAULT_SLO) -> None:
        self._limits = limits
        self._slo = slo
        self._workers: dict[str, _Worker] = {}
        self._requests: dict[str, _Request] = {}

    def describe(self, facts: WorkerSnapshot) -> None:
        """A worker is ready, or what does not depend on load changed: role, sizes, step model. Its loads are ignored;
        free_blocks counts until the first report."""
        if known := self._workers.get(facts.worker):
            known.facts, known.snapshot = facts, None
        else:
            self._workers[facts.worker] = _Worker(facts)

    def forget(self, worker: str) -> None:
        """A worker is gone; its requests end one by one as their owners notice."""
        self._workers.pop(worker, None)

    def reported(self, worker: str, report: Report, now_s: float) -> None:
        """A worker's load came in."""
        if (state := self._workers.get(worker)) is None:
            return
        state.report, state.snapshot = report, None
        seen_s = now_s - REPORT_LAG_S
        state.unseen = {name: placed_s for name, placed_s in state.unseen.items() if placed_s > seen_s}
        for name in [name for name, arrived_s in state.arrived.items() if arrived_s <= seen_s]:
            del state.arrived[name]
            self._keep_promise(name)

    def placed(self, request_id: str, request: PlacementRequest, plan: Plan, now_s: float) -> None:
        """A plan is being carried out: its decode room is promised from now on. Replaces an earlier attempt's."""
        self.ended(request_id)
        assert plan.decode, "WAIT and REFUSE are not carried out"
        reader, writer = self._workers.get(plan.prefill or plan.decode), self._workers.get(plan.decode)
        if reader is None or writer is None:
            return
        chosen = plan.chosen
        made = self._requests[request_id] = _Request(
            reader,
            writer,
            request.slo,
            read_tokens=request.prompt_tokens - (chosen.cached_tokens if chosen else 0),
            read_blocks=request.prompt_tokens // max(1, reader.facts.block_size_tokens) + 1,
            write_blocks=needed_blocks(request, writer.facts),
            long=chosen is not None and chosen.ttft_s > self._limits.long_prompt_s,
            context_tokens=request.prompt_tokens,
            growth_tokens=request.expected_output_tokens,
        )
        reader.reading += 1
        reader.slos[request.slo] += 1
        reader.unseen[request_id] = now_s
        self._write(made, 1)
        writer.promised_blocks += made.write_blocks
        writer.promised_long_blocks += made.write_blocks * made.long
        writer.slos[request.slo] += 1
        reader.snapshot = writer.snapshot = None

    def prompt_done(self, request_id: str) -> None:
        """The first token is there."""
        request = self._requests.get(request_id)
        if request is None or not request.reading:
            return
        self._write(request, -1)
        request.reading = False
        self._write(request, 1)
        request.writer.snapshot = None
        request.reader.reading -= 1
        request.reader.slos[request.slo] -= 1
        request.reader.unseen.pop(request_id, None)
        request.reader.snapshot = None

    def arrived(self, request_id: str, now_s: float) -> None:
        """The prompt's KV is in the writer's blocks; its reports will count them soon."""
        request = self._requests.get(request_id)
        if request and request.promised:
            request.writer.arrived[request_id] = now_s

    def wrote(self, request_id: str, tokens: int) -> None:
        """An answer grew. Seen with the next change of another kind: this one comes with every token."""
        if request := self._requests.get(request_id):
            request.context_tokens += tokens
            if not request.awaited:
                request.writer.context_tokens += tokens
            grown = min(tokens, request.growth_tokens)
            request.growth_tokens -= grown
            if not request.promised:
                request.writer.growth_tokens -= grown

    def ended(self, request_id: str) -> None:
        """A request is over, or left its workers."""
        self.prompt_done(request_id)
        self._keep_promise(request_id)
        if request := self._requests.pop(request_id, None):
            writer = request.writer
            writer.arrived.pop(request_id, None)
            self._write(request, -1)
            writer.growth_tokens -= request.growth_tokens
            writer.slos[request.slo] -= 1
            writer.snapshot = None

    @staticmethod
    def _write(request: _Request, count: int) -> None:
        """Counts an answer at its writer: once, or with -1 no more."""
        writer = request.writer
        if request.awaited:
            writer.awaited += count
        else:
            writer.to_come += count * (request.reading and request.reader is not writer)
            writer.writing += count
            writer.context_tokens += count * request.context_tokens

    def _keep_promise(self, request_id: str) -> None:
        request = self._requests.get(request_id)
        if request and request.promised:
            request.promised = False
            request.writer.promised_blocks -= request.write_blocks
            request.writer.promised_long_blocks -= request.write_blocks * request.long
            request.writer.growth_tokens += request.growth_tokens
            request.writer.snapshot = None

    def snapshots(self, workers: Sequence[str]) -> list[WorkerSnapshot]:
        """Workers as placement should see them now; only those that changed since the last call are made anew."""
        return [state.snapshot or self._snapshot(state) for name in workers if (state := self._workers.get(name))]

    def _snapshot(self, state: _Worker) -> WorkerSnapshot:
        facts, report = state.facts, state.report
        unseen = [self._requests[name] for name in state.unseen]
        # On its own writer a prompt's blocks are part of what is promised.
        unseen_blocks = sum(each.read_blocks for each in unseen if each.reader is not each.writer)
        free = facts.free_blocks if report is None else facts.total_blocks - report.used_blocks
        growth_blocks = state.growth_tokens // max(1, facts.block_size_tokens)
        pending = sum(each.read_tokens for each in unseen) + (report.pending_prompt_tokens if report else 0)
        running = report.running_sequences if report else 0
        state.snapshot = replace(
            facts,
            pending_prompt_tokens=pending,
            pending_prompts=max(state.reading, len(unseen) + (report.pending_prompts if report else 0)),
            running_sequences=max(state.writing, running),
            computes=bool(pending or running or state.writing > state.to_come),
            awaited_sequences=state.awaited,
            context_tokens=state.context_tokens,
            free_blocks=max(0, free - state.promised_blocks - unseen_blocks - growth_blocks),
            promised_long_blocks=state.promised_long_blocks,
            slo=tightest(state.slos, self._slo),
        )
        return state.snapshot
