"""Who gets how much of a step, among the prompts of one worker: the shortest first, and the oldest never nothing.

A short prompt that comes while a long one is computed is in the very next step. Prompts of about one length take turns
by age: to pass one that is nearly as short wins little, and makes the one that waited longer late. A step in which a
prompt ends is kept short, since a first token waits for it: those that go on get a part of it only; they have all of
the others. The oldest has that part of each step for certain, so that no flood of shorter ones can hold it up for ever,
and is let in first, so that they cannot take the memory that it waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.policy.step_model import StepModel, chunk_pairs

CERTAIN = 4
"""One part in so many of a step's room is for the oldest prompt, and for all that go on in a step in which one ends."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that has tokens to compute.

    left_tokens: how many. chunk_tokens: up to how many prompt tokens it fills a step, those of others before it
    included; 0 is no limit. priority: lower first, whatever its length. resumed: its client has tokens already, so it
    goes before all that have none. blocks: that it needs to be let in; None for one that runs.
    """

    left_tokens: int
    chunk_tokens: int = 0
    priority: int = 0
    resumed: bool = False
    blocks: int | None = None

    def wants(self, room_tokens: int, given_tokens: int = 0) -> int:
        """What it gets of so much room in a step that has given_tokens of other prompts already."""
        limit = max(0, self.chunk_tokens - given_tokens) if self.chunk_tokens else room_tokens
        return min(self.left_tokens, room_tokens, limit)

    def certain(self, room_tokens: int) -> int:
        """What it gets as the oldest, whatever the others want."""
        return min(self.left_tokens, -(-min(room_tokens, self.chunk_tokens or room_tokens) // CERTAIN))


def divide(prompts: Sequence[Prompt], room_tokens: int, places: int, free_blocks: int) -> list[tuple[int, int]]:
    """Divides a step among prompts.

    prompts: the older first. places, free_blocks: how many more may run, and what they may take. Returns index and
    tokens of those that run or are to be let in, in the order in which this is to happen; some get no tokens. Nobody is
    let in before one that does not fit.
    """
    if not prompts:
        return []
    by_length = sorted(range(len(prompts)), key=lambda index: _key(prompts[index]))
    oldest = min(range(len(prompts)), key=lambda index: prompts[index].priority)
    there = []
    for index in [oldest, *(index for index in by_length if index != oldest)]:
        blocks = prompts[index].blocks
        if blocks is not None:
            places, free_blocks = places - 1, free_blocks - blocks
        if blocks is None or (places >= 0 and free_blocks >= 0):
            there.append(index)
    kept = prompts[oldest].certain(room_tokens) if oldest in there else 0
    tokens = dict.fromkeys(there, 0)
    given, beside, ends, full = kept, beside_tokens(room_tokens) - kept, False, False
    for index in by_length:
        if index in tokens:
            prompt, own = prompts[index], kept if index == oldest else 0
            given, beside = given - own, beside + own
            got = 0 if full else prompt.wants(room_tokens - given, given)
            if ends and got < prompt.left_tokens:
                got = min(got, beside)
            # Nobody who is behind one that gets nothing gets more, but for what is certain.
            full = full or not (got or prompt.chunk_tokens)
            tokens[index] = got = max(own, got)
            given += got
            if got < prompt.left_tokens:
                beside = max(0, beside - got)
            else:
                ends = True
    return list(tokens.items())


SPARE_TOKENS = 128
"""Steps with fewer tokens of prompts use no spare cores: they would wait for threads that may be taken away."""
SHORT_S = 5.0
"""Steps are bounded while the last short prompt came no longer ago: long ones pay for it with a tenth and more."""
LEAST_ROOM = 32
"""Tokens for prompts that a step has at least, however long it takes, and by which its room is made smaller."""


def room_within(
    most_s: float, room_tokens: int, model: StepModel, answers: int, context_tokens: int, depth_tokens: int
) -> int:
    """Of a step's room for prompts, so much that the step takes no longer than it is to.

    answers, context_tokens: of the step besides; depth_tokens: computed before of the prompt that gets most of it.
    """
    if room_tokens <= LEAST_ROOM:
        return room_tokens
    full_s = model.batch_s(answers, context_tokens, room_tokens, chunk_pairs(depth_tokens, room_tokens))
    if full_s <= most_s:
        return room_tokens
    least_s = model.batch_s(answers, context_tokens, LEAST_ROOM, chunk_pairs(depth_tokens, LEAST_ROOM))
    if least_s >= most_s:
        return LEAST_ROOM
    # Step times are convex in the tokens: what fits below the chord fits.
    more = int((most_s - least_s) / (full_s - least_s) * (room_tokens - LEAST_ROOM))
    return LEAST_ROOM + more // LEAST_ROOM * LEAST_ROOM


class ShortPrompts:
    """Whether prompts come of late that are little of a step: they are to wait no long step for others."""

    def __init__(self) -> None:
        self._last_s = -math.inf

    def come(self, now_s: float, shortest_tokens: int | None, room_tokens: int) -> bool:
        """Asked at every step. shortest_tokens: of the shortest prompt that waits to be begun; None for no prompt."""
        if shortest_tokens is not None and shortest_tokens * CERTAIN <= room_tokens:
            self._last_s = now_s
        return now_s < self._last_s + SHORT_S


def passes(tokens: int, pending_tokens: int, pending_prompts: int) -> bool:
    """Whether a prompt of so many tokens is certainly before those that are pending: one among them may be shorter than
    they are on average."""
    return 0 < pending_prompts * tokens * CERTAIN <= pending_tokens


def beside_tokens(room_tokens: int) -> int:
    """What all prompts that go on get together of a step in which another ends."""
    return -(-room_tokens // CERTAIN)


def size_class(tokens: int) -> int:
    """Of prompts with so many tokens left: those of one class have between them less than a factor of CERTAIN."""
    return (tokens.bit_length() + 1) // 2


def _key(prompt: Prompt) -> tuple[int, int]:
    return prompt.priority, 0 if prompt.resumed else size_class(prompt.left_tokens)
