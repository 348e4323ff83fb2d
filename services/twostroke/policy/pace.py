"""How fast the cluster has been of late: what the queue in front of placement predicts with."""

from __future__ import annotations

from collections import deque

REMEMBERED = 64


class Pace:
    """The best of the last REMEMBERED requests, per token. It predicts the least that a request takes: what is refused
    by it has no hope. Until something was seen, everything takes no time."""

    def __init__(self) -> None:
        self._prompt_token_s: deque[float] = deque(maxlen=REMEMBERED)
        self._answer_token_s: deque[float] = deque(maxlen=REMEMBERED)

    def read(self, prompt_tokens: int, took_s: float) -> None:
        """A prompt of so many tokens that were not cached was computed."""
        if prompt_tokens > 0 and took_s > 0:
            self._prompt_token_s.append(took_s / prompt_tokens)

    def wrote(self, tokens: int, took_s: float) -> None:
        """So many tokens followed the first one of an answer."""
        if tokens > 0 and took_s > 0:
            self._answer_token_s.append(took_s / tokens)

    def prefill_s(self, prompt_tokens: int) -> float:
        """Least time to the first token of a prompt that is not cached."""
        return prompt_tokens * min(self._prompt_token_s, default=0.0)

    def answer_s(self, tokens: int) -> float:
        """Least time of an answer after its first token."""
        return max(0, tokens - 1) * min(self._answer_token_s, default=0.0)
