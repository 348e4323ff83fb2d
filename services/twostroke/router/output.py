"""What a request's life brings, on its way from the cluster to a front end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from twostroke.errors import TwostrokeError
from twostroke.policy.plan import Plan
from twostroke.v1.engine_pb2 import Finish, Logprobs, PromptStats
from twostroke.v1.inference_pb2 import Timeline


@dataclass(slots=True)
class Output:
    """New tokens of one request, or its end."""

    request_id: str
    token_ids: Sequence[int] = ()
    logprobs: Logprobs | None = None
    prompt: PromptStats | None = None
    """With the first token: what the prompt cost where it was computed."""
    prompt_logprobs: Logprobs | None = None
    finish: Finish | None = None
    failure: TwostrokeError | None = None


class Sink(Protocol):
    """Takes outputs in batches, one per engine step. Must not block."""

    def __call__(self, outputs: Sequence[Output]) -> None:
        """Takes a batch; outputs of one request come in order."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """An attempt that was given up. Moments are monotonic seconds."""

    placed_s: float | None
    failed_s: float
    prefill_worker_id: str
    reason: str
    error_type: str
    """The error's reason, see docs/errors.md."""
    decode_worker_id: str
    option: str
    handoff_begun_s: float | None


@dataclass(slots=True)
class Trail:
    """Where one request's time went. Moments are monotonic seconds; None for what did not happen."""

    received_s: float = field(default_factory=time.monotonic)
    placed_s: float | None = None
    prefill_queue_ms: float = 0.0
    prefill_run_ms: float = 0.0
    first_token_s: float | None = None
    decode_started_s: float | None = None
    finished_s: float | None = None
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    decode_computed_tokens: int = 0
    transferred_tokens: int = 0
    transferred_bytes: int = 0
    option: str = ""
    """How the last attempt was placed."""
    plan: Plan | None = None
    """The same, with what was predicted."""
    admitted_on: str = ""
    """The decode worker that the last attempt was given to."""
    prefill_ended_s: float | None = None
    """When the last attempt's first token came."""
    handoff_begun_s: float | None = None
    """When a decode worker was last told to fetch KV."""
    handoff_ready_s: float | None = None
    handoff_bytes: int = 0
    handoff_blocks: int = 0
    handoff_chunks: int = 0
    handoff_lanes: tuple[str, ...] = ()
    link_bytes_per_s: float = 0.0
    attempts: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    answered: bool = False
    """The client has the end of the answer."""
    over: bool = False
    """Nothing more will come."""
    finish: str = ""
    """How the answer ended: stop, length and so on."""
    failure: str = ""
    error_type: str = ""
    """The failure's reason, see docs/errors.md."""
    failed_attempts: list[FailedAttempt] = field(default_factory=list)
    trace_id: str = ""

    @property
    def ended_by(self) -> str:
        """How it ended: as the engine said, error, or abort, when the client left or the front end had enough."""
        return self.finish or ("error" if self.failure else "abort")

    @property
    def exposed_s(self) -> float | None:
        """How much later than the first token decode had the KV; None without a hand-off."""
        if self.handoff_ready_s is None or self.prefill_ended_s is None:
            return None
        return max(0.0, self.handoff_ready_s - self.prefill_ended_s)

    def timeline(self) -> Timeline:
        """As clients see it: milliseconds since the request came in.

        Prefill's own queue and run times are put before the first token, since its clock is not ours.
        """

        def since(moment_s: float | None) -> float:
            return 0.0 if moment_s is None else (moment_s - self.received_s) * 1000

        finished_ms = since(self.first_token_s)
        return Timeline(
            prefill_worker_id=self.prefill_worker_id,
            decode_worker_id=self.decode_worker_id,
            placed_ms=since(self.placed_s),
            prefill_started_ms=max(since(self.placed_s), finished_ms - self.prefill_run_ms),
            prefill_finished_ms=finished_ms,
            first_token_ms=finished_ms,
            decode_started_ms=since(self.decode_started_s),
            finished_ms=since(self.finished_s),
            decode_computed_tokens=self.decode_computed_tokens,
            transferred_tokens=self.transferred_tokens,
            transferred_bytes=self.transferred_bytes,
            attempts=self.attempts,
        )
