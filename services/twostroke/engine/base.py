"""The seam between a worker and the engine it drives.

An engine computes steps. Each step advances every running request by up to one token, and `next_step` reports what came
of it, for all requests at once. Requests are admitted for one of three strokes:

  PREFILL  compute the prompt, choose one token, hold the prompt's KV until it is read, released or its lease ends
  DECODE   fetch the prompt's KV from the given hand-off, then write the answer
  WHOLE    both, here

An engine continues exactly: `request.output_token_ids` count as if it had chosen them itself (for penalties, limits,
grammar, random numbers), and it does not report them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from twostroke.errors import TwostrokeError
from twostroke.kv.link import LinkReport
from twostroke.policy.block_hash import BlockHashing
from twostroke.policy.kv_events import Change
from twostroke.policy.spare import NO_CORES, Cores
from twostroke.policy.step_model import LinearStepModel, StepBatch
from twostroke.v1.engine_pb2 import EngineRequest, Finish, Logprobs, PromptStats
from twostroke.v1.kv_pb2 import Handoff, KvEndpoint, KvLayout

__all__ = [
    "Engine",
    "EngineInfo",
    "EngineLoad",
    "EngineOutput",
    "EngineStep",
    "LinkReport",
    "StepSample",
    "Stroke",
]


class Stroke(Enum):
    """What an engine is asked to do for a request."""

    PREFILL = "prefill"
    DECODE = "decode"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, once it has started."""

    engine: str
    """ "vllm" or "reference"."""
    engine_version: str
    model: str
    """The model as it was named."""
    max_model_len_tokens: int
    """Longest sequence, prompt and answer together."""
    vocab_size: int
    total_blocks: int
    step_budget_tokens: int
    """Most tokens that one step computes."""
    max_sequences: int
    """Most sequences that one step runs."""
    layout: KvLayout
    prior: LinearStepModel
    """What steps are expected to take, before any was seen."""
    block_hashing: BlockHashing | None = None
    """How it names blocks that it caches; None where it caches none."""
    start_phases: tuple[tuple[str, float], ...] = ()
    """Parts of the start with their durations in milliseconds, in order."""
    kv_endpoint: KvEndpoint = field(default_factory=KvEndpoint)
    """Where other engines read its KV."""
    most_step_s: float = 0.0
    """How long its steps with prompts are to take at most; 0 is no bound."""
    cores: Cores = NO_CORES
    """Where it computes, as far as that is told."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Where an engine stands after a step. Counters run since its start."""

    waiting_requests: int = 0
    running_requests: int = 0
    pending_prompt_tokens: int = 0
    """Of prompts to be computed here, what is not computed yet."""
    pending_prompts: int = 0
    """Prompts that those tokens belong to."""
    used_blocks: int = 0
    """Blocks in use, held ones included; blocks that only cache a prefix are free."""
    held_handoffs: int = 0
    held_blocks: int = 0
    """Blocks that wait for decode workers to fetch them."""
    kv_received_bytes: int = 0
    kv_received_handoffs: int = 0
    computed_prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0


@dataclass(slots=True)
class EngineOutput:
    """What one step brought for one request."""

    request_id: str
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    """One position per token, when asked for."""
    started: bool = False
    """The first step that runs this request has begun; early from engines that can tell, else with the first token."""
    prompt: PromptStats | None = None
    """Set once, with the first token."""
    prompt_logprobs: Logprobs | None = None
    handoff: Handoff | None = None
    """KV on offer: with `started` where it can be read while prefill runs, else with the end of the PREFILL stroke."""
    finish: Finish | None = None
    """The answer is over."""
    done: bool = False
    """The request is over on this engine: finished, failed, or its PREFILL stroke is complete."""
    failure: TwostrokeError | None = None


@dataclass(frozen=True, slots=True)
class StepSample:
    """A step that the engine made."""

    batch: StepBatch
    duration_s: float
    """From its beginning, or from the end of the step before if the engine went on at once, to its end; what was
    computed on spare cores counts as computed on the engine's own."""
    spared_s: float = 0.0
    """What spare cores saved of that."""


@dataclass(frozen=True, slots=True)
class EngineStep:
    """One step for all requests, and the load after it."""

    outputs: list[EngineOutput] = field(default_factory=list)
    load: EngineLoad = field(default_factory=EngineLoad)
    samples: Sequence[StepSample] = ()
    """Steps made since the last report: usually one, none where only the load changed."""
    kv_changes: Sequence[Change] = ()
    """What happened to its blocks since then, in order. Those of the first report follow an empty cache."""


class Engine(Protocol):
    """What a worker drives. All methods are called from one event loop."""

    async def start(self) -> EngineInfo:
        """Makes the engine ready.

        Raises ConfigError for a setting that cannot work, EngineError when the engine does not come up. Cancellation
        takes down what was started.
        """
        ...

    async def admit(
        self, request: EngineRequest, stroke: Stroke, handoff: Handoff | None = None, chunk_tokens: int = 0
    ) -> None:
        """Queues a request. Its outputs come from `next_step`, the last one with `done` set.

        handoff is given for DECODE only. One that is in progress is fetched while prefill computes, and brings the
        first token when the request has none. chunk_tokens: up to how many prompt tokens it may fill a step, see
        policy/turns.py; 0 is no limit. Raises InvalidRequestError (nothing was queued then), EngineError.
        """
        ...

    async def cancel(self, request_ids: Sequence[str]) -> None:
        """Ends requests and frees what they hold, held KV included. No further output names them. Unknown ids are
        ignored."""
        ...

    async def release(self, request_ids: Sequence[str]) -> int:
        """Frees KV held by finished PREFILL strokes that nobody will read. Returns how many of the ids held any."""
        ...

    async def probe(self, worker_id: str, epoch: str, endpoint: KvEndpoint) -> LinkReport:
        """Reads a known pattern out of another engine's memory and checks it.

        Raises KvCorruptError for wrong bytes, WorkerLostError or DeadlineError when it cannot be reached. Cancellation
        gives up.
        """
        ...

    async def drop_peer(self, worker_id: str, epoch: str) -> None:
        """Forgets an epoch of another engine that has ended. Requests that wait for its KV fail with KvLostError."""
        ...

    async def next_step(self) -> EngineStep:
        """Waits for the next step and returns its outcome; called again and again by exactly one task.

        Raises EngineError when the engine is lost; every request is lost with it. Cancellation loses no step.
        """
        ...

    async def close(self) -> None:
        """Takes the engine down; idempotent. Held KV becomes unreadable."""
        ...
