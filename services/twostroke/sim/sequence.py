"""What an engine works on: one stroke of one request."""

from __future__ import annotations

from collections.abc import Sequence as Items
from enum import IntEnum

from twostroke.sim.blocks import Holding


class Stroke(IntEnum):
    """What a worker does for a request."""

    WHOLE = 0
    PREFILL = 1
    DECODE = 2


class Sequence:
    """A stroke on one worker.

    prompt_tokens: to be in KV before the next token can be chosen; tokens that the client already has count.
    output_tokens: still to be chosen on this worker.
    """

    __slots__ = (
        "age",
        "cached_tokens",
        "chunk_tokens",
        "computed",
        "context",
        "finish_step",
        "hashes",
        "held",
        "joined_step",
        "last_token_s",
        "link",
        "order",
        "output_tokens",
        "over",
        "over_base",
        "prompt_tokens",
        "request",
        "resumed",
        "seen_tokens",
        "stroke",
    )

    def __init__(
        self, request: int, stroke: Stroke, prompt_tokens: int, output_tokens: int, hashes: Items[int]
    ) -> None:
        self.request = request
        self.stroke = stroke
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        self.hashes = hashes
        """Of full prefix units only."""
        self.held: Holding | None = None
        self.chunk_tokens = prompt_tokens
        """Most of the prompt that one step computes."""
        self.computed = 0
        self.cached_tokens = 0
        self.context = 0
        """Tokens at joined_step, the one whose KV the next step computes included."""
        self.joined_step = 0
        self.finish_step = 0
        self.order = 0
        self.last_token_s = -1.0
        """Of a token that was chosen elsewhere or before a preemption; negative when there is none."""
        self.over = 0
        self.over_base = 0
        self.link: object = None
        self.age = 0
        """The lower, the earlier it came."""
        self.resumed = False
        """It was preempted."""
        self.seen_tokens = prompt_tokens
        """Of the prompt, what was not cached when it came: its length for those that take turns by length."""
