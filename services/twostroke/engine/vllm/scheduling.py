"""vLLM's scheduler, which also shares a step's room among prompts as policy/turns.py divides it, and tells what its
steps take and what blocks it has.

vLLM gives a running prompt all the room that it can use, and others wait until it is done. Here each prompt gets its
share beforehand, and vLLM's own loop is held to it: `_reserve_prefill_lookahead` has the last word on the tokens of a
request, running or waiting.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventPublisher
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from twostroke.engine.base import StepSample
from twostroke.engine.vllm.pace import Pace
from twostroke.engine.vllm.report import CHUNK_ARG, REPORT, Report, change_row, sample_row
from twostroke.policy.kv_events import Change, Cleared, Removed, Stored
from twostroke.policy.step_model import StepBatch, chunk_pairs
from twostroke.policy.turns import Prompt, ShortPrompts, divide

REFUSED_STEPS = 8
"""So long nothing is set aside for a prompt that vLLM did not let in although it had a share."""


def block_hashing(core: Any) -> tuple[str, bytes, int] | None:
    """Algorithm, root and tokens of the block hashes; None where blocks of several kinds make one hit. A utility of
    EngineCore, called over vLLM's own channel."""
    scheduler = core.scheduler
    if not scheduler.tells_blocks:
        return None
    algorithm = scheduler.cache_config.prefix_caching_hash_algo
    return str(algorithm), bytes(kv_cache_utils.NONE_HASH), int(scheduler.block_size)


EngineCore.twostroke_block_hashing = block_hashing


def bound_steps(core: Any, most_step_s: float) -> None:
    """From now on steps with prompts are to take no longer; 0 is no bound. A utility of EngineCore as well."""
    core.scheduler.most_step_s = most_step_s


EngineCore.twostroke_most_step_s = bound_steps


class _KeptEvents(EventPublisher):
    """Keeps vLLM's events of blocks until they are told."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Any] = []

    def publish(self, events: Any) -> None:
        self.events.extend(events.events)

    def shutdown(self) -> None:
        """Nothing to do."""


class SharingScheduling(Scheduler):
    """What both schedulers have more than vLLM's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shares: dict[str, int] = {}
        """Most tokens of the step that is being planned, by request; those not named have no limit but their own."""
        self._under_way: deque[tuple[SchedulerOutput, StepBatch, float]] = deque()
        """Steps with the moments at which they were begun."""
        self._ended_s: float | None = None
        """When the last step ended, if the engine goes on at once."""
        self._samples: list[StepSample] = []
        self.most_step_s = 0.0
        self._pace = Pace()
        self._shorts = ShortPrompts()
        self._kept = _KeptEvents()
        groups = len(self.kv_cache_config.kv_cache_groups)
        self.tells_blocks = self.enable_kv_cache_events and groups == 1 and self.hash_block_size == self.block_size
        if self.tells_blocks:
            self.kv_event_publisher = self._kept

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Gives every prompt its share, then schedules as ever."""
        begun_s = time.monotonic()
        let_in = self._share()
        planned = super().schedule(*args, **kwargs)
        if planned.total_num_scheduled_tokens:
            self._under_way.append((planned, self._batch(planned), begun_s))
        for request in let_in:
            if request.status != RequestStatus.RUNNING:
                request.refused_step = self.current_step
        return planned

    def _share(self) -> list[Any]:
        """Decides on the shares, and on the order of those who wait. Returns those that are to be let in."""
        self._shares = {}
        begun = [request for request in self.running if request.is_prefill_chunk]
        if not (begun or self.waiting) or self.need_mamba_block_aligned_split:
            return []
        waiting: list[Any] = []
        others: list[Any] = []
        for request in self.waiting:
            (others if self._needs_no_share(request) else waiting).append(request)
        found = {request.request_id: request for request in (*begun, *waiting)}
        by_age = [found[name] for name in self.requests if name in found and not self._was_refused(found[name])]
        room = max(0, self.max_num_scheduled_tokens - self._other_tokens(bool(others)))
        prompts = [self._prompt(request) for request in by_age]
        shortest = min((each.left_tokens for each in prompts if each.blocks is not None), default=None)
        if self.most_step_s and self._shorts.come(time.monotonic(), shortest, room):
            answers = [each.num_computed_tokens for each in self.running if not each.is_prefill_chunk]
            depth = max((each.num_computed_tokens for each in begun), default=0)
            room = self._pace.room(self.most_step_s, room, len(answers), sum(answers), depth)
        places = self.max_num_active_reqs - len(self.running)
        # Those that run are to find the memory that they need yet.
        needed = sum(-(-(each.num_tokens - each.num_computed_tokens) // self.block_size) for each in begun)
        free_blocks = self.kv_cache_manager.block_pool.get_num_free_blocks() - needed
        shares = divide(prompts, room, places, free_blocks)
        self._shares = {by_age[index].request_id: tokens for index, tokens in shares}
        let_in = [by_age[index] for index, tokens in shares if tokens]
        let_in = [request for request in let_in if request.status != RequestStatus.RUNNING]
        for request in (*begun, *let_in):
            del found[request.request_id]
        self.waiting.clear()
        self.waiting.extend([*others, *let_in, *(found[name] for name in self.requests if name in found)])
        return let_in

    def _prompt(self, request: Any) -> Prompt:
        runs = request.status == RequestStatus.RUNNING
        left = request.num_tokens - (request.num_computed_tokens if runs else self._cached_tokens(request))
        return Prompt(
            left,
            _chunk_tokens(request),
            request.priority,
            resumed=request.num_preemptions > 0,
            blocks=None if runs else -(-left // self.block_size),
        )

    def _needs_no_share(self, request: Any) -> bool:
        """Of those who wait: whether it is to fetch its KV, or cannot run yet."""
        fetches = bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
        blocked = self._is_blocked_waiting_status(request.status)
        return bool(blocked or (fetches and request.status == RequestStatus.WAITING))

    def _was_refused(self, request: Any) -> bool:
        """Of those who wait: whether vLLM did not let it in of late; it may, with what is left over."""
        since = self.current_step - getattr(request, "refused_step", -REFUSED_STEPS)
        return bool(request.status != RequestStatus.RUNNING and since < REFUSED_STEPS)

    def _other_tokens(self, looks: bool) -> int:
        """Tokens of the step for all but prompts. looks: vLLM is to look at those who wait, for which it wants to have
        room left."""
        tokens = 0
        for request in self.running:
            if not request.is_prefill_chunk:
                ahead = request.num_tokens_with_spec + request.num_output_placeholders
                tokens += max(0, ahead - request.num_computed_tokens)
        for request in self.kv_holding_waiting:
            if (
                request.status != RequestStatus.WAITING_FOR_REMOTE_KVS
                or request.request_id in self.finished_recving_kv_req_ids
            ):
                tokens += max(1, request.num_tokens - request.num_computed_tokens)
        return tokens + looks

    def _cached_tokens(self, request: Any) -> int:
        """Tokens of a waiting prompt that need not be computed, as it looked when it came."""
        found = getattr(request, "expected_cached_tokens", None)
        if found is None:
            found = 0
            if self.tells_blocks and not request.skip_reading_prefix_cache:
                pool = self.kv_cache_manager.block_pool
                for block_hash in request.block_hashes:
                    if pool.get_cached_block(block_hash, [0]) is None:
                        break
                    found += self.block_size
            request.expected_cached_tokens = found
        return int(min(found, request.num_tokens - 1))

    def _reserve_prefill_lookahead(self, request: Request, num_computed_tokens: int, num_new_tokens: int) -> int:
        """vLLM's last word on the tokens of a request in a step; ours comes before it."""
        if not self.need_mamba_block_aligned_split:
            limit = self._shares.get(request.request_id, _chunk_tokens(request) or num_new_tokens)
            num_new_tokens = min(num_new_tokens, limit)
        return int(super()._reserve_prefill_lookahead(request, num_computed_tokens, num_new_tokens))

    def _batch(self, planned: SchedulerOutput) -> StepBatch:
        sequences = context_tokens = tokens = chunks = 0
        pairs = 0.0
        for request_id, count in planned.num_scheduled_tokens.items():
            computed = self.requests[request_id].num_computed_tokens - count
            # The last token of a prompt that was fetched or cached costs what one of an answer does.
            if count - len(planned.scheduled_spec_decode_tokens.get(request_id, ())) <= 1:
                sequences += 1
                context_tokens += computed + 1
            else:
                tokens += count
                chunks += 1
                pairs += chunk_pairs(computed, count)
        return StepBatch(sequences, context_tokens, tokens, pairs, chunks)

    def update_from_output(self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput) -> Any:
        """Takes the step's time, then does as ever."""
        now_s = time.monotonic()
        if self._under_way and self._under_way[0][0] is scheduler_output:
            _, batch, begun_s = self._under_way.popleft()
            took_s = now_s - (begun_s if self._ended_s is None else self._ended_s)
            # Models are of own cores, which a worker always has: work on spare ones counts as done on its own.
            spared_s = getattr(model_runner_output, "spared_s", 0.0)
            own_s = took_s + spared_s
            self._samples.append(StepSample(batch, own_s, spared_s))
            if self.most_step_s:
                self._pace.observe(batch, own_s, took_s)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self._ended_s = now_s if self.running or self._under_way else None
        return outputs

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats | None:
        """vLLM's numbers, and what we tell."""
        stats = super().make_stats(*args, **kwargs)
        samples, self._samples = self._samples, []
        events, self._kept.events = self._kept.events, []
        if stats is not None:
            report = Report(
                steps=[sample_row(sample) for sample in samples],
                progress={
                    request.request_id: request.num_computed_tokens
                    for request in self.running
                    if request.num_computed_tokens < request.num_prompt_tokens
                },
                blocks=[change_row(change) for change in map(_change, events) if change is not None],
            )
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), REPORT: report}
        return stats


def _chunk_tokens(request: Any) -> int:
    more = (request.sampling_params and request.sampling_params.extra_args) or {}
    return int(more.get(CHUNK_ARG, 0))


def _change(event: Any) -> Change | None:
    match event:
        case BlockStored():
            return Stored(event.block_hashes, event.parent_block_hash)
        case BlockRemoved():
            return Removed(event.block_hashes)
        case AllBlocksCleared():
            return Cleared()
    return None


class SharingScheduler(SharingScheduling):
    """For engines that compute one step at a time."""


class AsyncSharingScheduler(SharingScheduling, AsyncScheduler):
    """For engines that schedule a step while the last one runs."""
