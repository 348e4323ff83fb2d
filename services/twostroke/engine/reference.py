"""The reference engine: a deterministic engine with a real KV block pool in real shared memory.

It schedules, caches, preempts, hands off and fails as a real engine does, but its model is arithmetic: a token costs
microseconds, and every answer is known beforehand (`reference_model.expected_tokens`). See docs/reference_engine.md.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from twostroke.config import WorkerSettings
from twostroke.engine.base import EngineInfo, EngineLoad, EngineOutput, EngineStep, LinkReport, StepSample, Stroke
from twostroke.engine.fault_plan import EXIT_STATUS, Crash, Exit, FaultPlan, Stall, parse_faults
from twostroke.engine.reference_admission import sequence_of
from twostroke.engine.reference_core import Core, Limits
from twostroke.engine.reference_handoff import Holds
from twostroke.engine.reference_model import (
    BLOCK_SIZE_TOKENS,
    MAX_MODEL_LEN_TOKENS,
    MODEL_NAME,
    MODEL_VERSION,
    VOCAB_SIZE,
    block_words,
    layout,
)
from twostroke.engine.reference_pool import BlockPool
from twostroke.engine.reference_receive import Inbox, probe
from twostroke.engine.reference_schedule import Plan, Scheduler
from twostroke.engine.reference_sequence import Sequence as Request
from twostroke.errors import ConfigError, EngineError, InvalidRequestError, OverloadedError, WorkerLostError
from twostroke.kv.shm import SHM_FOLDER, Segment, remove_stale
from twostroke.policy.block_hash import BlockHashing
from twostroke.policy.step_model import LinearStepModel
from twostroke.v1.engine_pb2 import EngineRequest
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint

HOLD_POLL_S = 0.02
"""How often an idle engine looks for acknowledgements and for leases that ended."""
RECEIVE_POLL_S = 0.002
"""How often an idle engine looks for KV that it fetches."""


@dataclass(slots=True)
class _Step:
    """A planned step. It stays until it is carried out, so that cancelling `next_step` loses nothing."""

    plan: Plan
    begun_s: float
    duration_s: float | None = None
    """None until its faults have happened."""


class ReferenceEngine:
    """An Engine for tests, demonstrations and development without a model.

    clock: seconds, monotonic. sleep: must let the clock advance by the seconds given. verify: compare fetched KV with
    what it must be; without it, wrong KV shows in the tokens only. folder: where the KV segment lies; hand-offs work
    between engines with the same folder. Raises ConfigError for settings that cannot work.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        epoch: str,
        worker_id: str,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        verify: bool = True,
        vocab_size: int = VOCAB_SIZE,
        folder: Path = SHM_FOLDER,
    ) -> None:
        self._settings = settings
        self._epoch = epoch
        self._worker_id = worker_id
        self._clock = clock
        self._sleep = sleep
        self._verify = verify
        self._folder = folder
        self._limits = _limits(settings, vocab_size)
        self._prior = LinearStepModel(settings.reference_step_ms / 1e3, 0.0, 0.0, settings.reference_token_us / 1e6)
        self._faults = FaultPlan(parse_faults(settings.reference_faults))
        self._core: Core | None = None
        self._step: _Step | None = None
        self._end = "the engine has not been started"
        self._alive = False
        self._wake = asyncio.Event()
        self._closed = asyncio.Event()
        self._stalled_until_s = -math.inf
        self._told = EngineLoad()
        self._asked = 0
        self._samples: list[StepSample] = []

    async def start(self) -> EngineInfo:
        """Makes the KV segment and removes those of dead engines. Raises ConfigError when there is no room for it."""
        if self._closed.is_set() or self._core is not None:
            raise EngineError("the engine starts once")
        begin_s = time.perf_counter()
        remove_stale(self._folder)
        settings, limits = self._settings, self._limits
        segment = Segment.create(
            epoch=self._epoch,
            blocks=settings.reference_blocks,
            block_words=block_words(limits.block_size_tokens),
            folder=self._folder,
        )
        self._core = self._new_core(BlockPool(segment, limits.block_size_tokens))
        self._alive = True
        return EngineInfo(
            engine="reference",
            engine_version=MODEL_VERSION,
            model=settings.model or MODEL_NAME,
            max_model_len_tokens=limits.max_model_len_tokens,
            vocab_size=limits.vocab_size,
            total_blocks=settings.reference_blocks,
            step_budget_tokens=settings.step_budget_tokens,
            max_sequences=settings.max_sequences,
            layout=layout(limits.block_size_tokens, limits.vocab_size),
            prior=self._prior,
            block_hashing=BlockHashing(limits.block_size_tokens),
            start_phases=(("segment", (time.perf_counter() - begin_s) * 1e3),),
            kv_endpoint=KvEndpoint(addresses=[segment.name.encode()]),
        )

    async def admit(
        self, request: EngineRequest, stroke: Stroke, handoff: Handoff | None = None, chunk_tokens: int = 0
    ) -> None:
        """Queues a request.

        Raises UnsupportedFieldError, PromptTooLongError or InvalidRequestError for a request that cannot be served,
        OverloadedError where the fault plan says so, EngineError when the engine is down.
        """
        core = self._living_core()
        self._asked += 1
        if self._faults.refuses(self._asked):
            raise OverloadedError(f"the fault plan refuses request {self._asked}")
        core.holds.reap()
        request_id = request.request_id
        if not request_id or request_id in core.sequences or request_id in core.holds:
            raise InvalidRequestError(f"request id {request_id!r} is empty or in use here")
        core.add(
            sequence_of(
                request,
                stroke,
                handoff,
                self._limits,
                ordinal=self._asked,
                now_s=self._clock(),
                early=not self._settings.reference_late,
                chunk_tokens=chunk_tokens,
            )
        )
        self._wake.set()

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests and holds; their blocks are free on return."""
        if self._core is not None:
            for sequence in self._core.cancel(request_ids):
                if self._step is not None:
                    self._step.plan.drop(sequence)
        await self.release(request_ids)

    async def release(self, request_ids: Sequence[str]) -> int:
        """Ends holds; their blocks are free on return. Returns how many of the ids had one."""
        if self._core is None or self._closed.is_set():
            return 0
        self._wake.set()
        return sum(map(self._core.holds.release, request_ids))

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """Reads the pattern in another engine's segment.

        Raises KvCorruptError, LayoutMismatchError, and WorkerLostError when the segment or its owner is gone.
        """
        self._living_core()
        if self._faults.cuts(worker_id):
            raise WorkerLostError(f"the fault plan cuts the link from {worker_id}")
        return probe(endpoint, epoch, self._limits.block_size_tokens, self._folder)

    async def drop_peer(self, worker_id: str, epoch: str) -> None:
        """Fails the requests that wait for KV of that epoch; attachments to it go with them."""
        if self._core is not None:
            self._core.drop_peer(worker_id, epoch)
            self._wake.set()

    async def next_step(self) -> EngineStep:
        """The next step, or the load alone when it changed without a step.

        `started` of a PREFILL stroke comes before its first step is computed, with KV on offer unless it ends with its
        first token. Cancellation leaves the step to the next
        call. Raises EngineError when the engine is closed, has crashed, or was never started.
        """
        while True:
            await self._sit_out_stall()
            core = self._living_core()
            self._wake.clear()
            core.holds.reap()
            failures = core.receive()
            if self._step is None or not self._step.plan.rows:
                plan = core.scheduler.plan()
                self._step = _Step(plan, self._clock()) if plan.rows else None
            if failures:
                outputs = failures
            elif self._step is not None:
                outputs = self._begin(self._step.plan, core) or await self._run(self._step, core)
            elif core.load() != self._told:
                outputs = []
            else:
                await self._idle(RECEIVE_POLL_S if core.receives else HOLD_POLL_S if len(core.holds) else None)
                continue
            self._told = core.load()
            samples, self._samples = self._samples, []
            return EngineStep(outputs, self._told, samples, core.pool.take_changes())

    async def close(self) -> None:
        """Removes the KV segment and ends a waiting `next_step` with EngineError; idempotent."""
        self._alive = False
        self._end = "the engine is closed"
        self._closed.set()
        self._wake.set()
        if self._core is not None:
            self._core.inbox.close()
            self._core.pool.segment.close()

    def _living_core(self) -> Core:
        if self._core is None or not self._alive:
            raise EngineError(self._end)
        return self._core

    def _new_core(self, pool: BlockPool) -> Core:
        settings, clock, faults = self._settings, self._clock, self._faults
        holds = Holds(
            pool, faults, worker_id=self._worker_id, epoch=self._epoch, lease_s=settings.kv_lease_s, clock=clock
        )
        inbox = Inbox(pool, faults, clock=clock, stall_s=settings.kv_stall_s, verify=self._verify, folder=self._folder)

        def give_up(sequence: Request) -> None:
            holds.withdraw(sequence)
            inbox.drop(sequence)

        scheduler = Scheduler(pool, settings.step_budget_tokens, settings.max_sequences, give_up)
        return Core(pool, scheduler, holds, inbox, self._limits, clock=clock)

    async def _idle(self, timeout_s: float | None) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()

    async def _sit_out_stall(self) -> None:
        while (left_s := self._stalled_until_s - self._clock()) > 0:
            self._living_core()
            await (self._sleep(left_s) if left_s < math.inf else self._closed.wait())

    def _begin(self, plan: Plan, core: Core) -> list[EngineOutput]:
        """Notes whose first step this is. Returns what is reported of it before the step is computed."""
        now_s = self._clock()
        outputs = []
        for sequence in plan.rows:
            if sequence.first_step_s is None:
                sequence.first_step_s = now_s
                if sequence.stroke is Stroke.PREFILL:
                    sequence.announced = True
                    handoff = core.holds.begin(sequence) if sequence.early else None
                    outputs.append(EngineOutput(sequence.request_id, started=True, handoff=handoff))
        return outputs

    async def _run(self, step: _Step, core: Core) -> list[EngineOutput]:
        if step.duration_s is None:
            step.duration_s = self._enter(step.plan, core.counters.steps + 1)
            await self._sit_out_stall()
        await self._sleep(step.duration_s)
        self._living_core()
        self._step = None
        batch = step.plan.batch()
        outputs = core.carry_out(step.plan)
        self._samples.append(StepSample(batch, self._clock() - step.begun_s))
        return outputs

    def _enter(self, plan: Plan, number: int) -> float:
        """Lets the faults of the step with this number happen. Returns the step's time in seconds."""
        ordinals = {sequence.ordinal for sequence in plan.rows if not sequence.ran}
        for sequence in plan.rows:
            sequence.ran = True
        for fault in self._faults.due(number, ordinals):
            match fault:
                case Stall():
                    stall_s = math.inf if fault.duration_s is None else fault.duration_s
                    self._stalled_until_s = self._clock() + stall_s
                case Crash():
                    self._alive = False
                    self._end = f"the fault plan crashed the engine at step {number}"
                    self._living_core()
                case Exit():
                    os._exit(EXIT_STATUS)
        return self._prior.step_s(plan.batch()) * self._faults.slowness()


def _limits(settings: WorkerSettings, vocab_size: int) -> Limits:
    block_size_tokens = settings.block_size_tokens or BLOCK_SIZE_TOKENS
    room_tokens = settings.reference_blocks * block_size_tokens
    length_tokens = settings.max_model_len_tokens or min(MAX_MODEL_LEN_TOKENS, room_tokens)
    if length_tokens > room_tokens:
        raise ConfigError(
            f"--max-model-len-tokens {length_tokens} does not fit the KV of --reference-blocks "
            f"{settings.reference_blocks}, {room_tokens} tokens; change one of them"
        )
    return Limits(vocab_size, length_tokens, block_size_tokens)
