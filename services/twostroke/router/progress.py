"""How far a request is, across all attempts at it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from twostroke.policy.placement import PlacementRequest
from twostroke.policy.snapshot import DEFAULT_SLO, EXPECTED_TOKENS, Slo
from twostroke.router.output import Output, Trail
from twostroke.v1.engine_pb2 import EngineRequest, Finish, FinishReason, Logprobs, PromptStats, SamplingParams

MOST_URGENT, LEAST_URGENT = -16, 16
"""Priorities beyond count as these: each has a queue of its own."""

_FINISHES = {number: name.removeprefix("FINISH_REASON_").lower() for name, number in FinishReason.items()}


class Progress:
    """What the client has, what failed, and how much time is left. deadline_s: a moment of the monotonic clock."""

    def __init__(
        self,
        request: EngineRequest,
        emit: Callable[[Output], None],
        deadline_s: float,
        tenant: str = "",
        slo: Slo = DEFAULT_SLO,
    ) -> None:
        self.request = request
        self.trail = Trail(prompt_tokens=len(request.prompt_token_ids))
        self.delivered: list[int] = []
        """The tokens that the client has."""
        self.ended = False
        """The client has the end of the answer."""
        self.failed_on: set[str] = set()
        """Addresses of workers that failed this request."""
        self.block_tokens = 1
        """Tokens per KV block of the decode worker."""
        self.ticket = ""
        """Under which the request counts as in flight."""
        self.cached_tokens: Mapping[str, int] = {}
        """Prompt tokens that workers have in their caches, as it was when the attempt was to be placed."""
        self._tenant = tenant
        self._slo = slo
        self._emit = emit
        self._deadline_s = deadline_s

    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self._deadline_s - time.monotonic()

    @property
    def repeatable(self) -> bool:
        """Whether the same request has the same answer again: the most probable tokens, or a seed."""
        sampling = self.request.sampling
        return sampling.HasField("seed") or (sampling.HasField("temperature") and sampling.temperature == 0)

    def placement(self) -> PlacementRequest:
        """What placement needs to know."""
        sampling, delivered = self.request.sampling, len(self.delivered)
        return PlacementRequest(
            len(self.request.prompt_token_ids),
            frozenset(self.failed_on),
            expected_output_tokens=expected_tokens(sampling, delivered),
            cached_tokens=self.cached_tokens,
            slo=self._slo,
            deadline_s=self.remaining_s(),
            priority=priority(self.request.priority),
            tenant=self._tenant,
        )

    def copy(self, request_id: str) -> EngineRequest:
        """The request under the id of an attempt."""
        copied = EngineRequest()
        copied.CopyFrom(self.request)
        copied.request_id = request_id
        return copied

    def deliver(
        self,
        token_ids: list[int],
        logprobs: Logprobs | None,
        finish: Finish | None,
        prompt: PromptStats | None = None,
        prompt_logprobs: Logprobs | None = None,
    ) -> None:
        """Passes new tokens on, and with the last of them how the answer ended."""
        if self.trail.first_token_s is None and token_ids:
            self.trail.first_token_s = time.monotonic()
        self.delivered.extend(token_ids)
        self.trail.completion_tokens = len(self.delivered)
        if prompt is not None:
            self.trail.cached_tokens = prompt.cached_tokens
        if finish is not None:
            self.trail.finish = _FINISHES[finish.reason]
            self.ended = self.trail.answered = True
            self.trail.finished_s = time.monotonic()
        self._emit(Output(self.request.request_id, token_ids, logprobs, prompt, prompt_logprobs, finish))


def expected_tokens(sampling: SamplingParams, delivered: int = 0) -> int:
    """Tokens that an answer is expected to have, those that its client has included."""
    left = sampling.max_tokens - delivered if sampling.HasField("max_tokens") else EXPECTED_TOKENS
    return delivered + max(1, min(left, EXPECTED_TOKENS))


def priority(asked: int) -> int:
    """A priority as the queue in front of placement counts it."""
    return max(MOST_URGENT, min(asked, LEAST_URGENT))
