"""How an engine fills its steps, and what a closed loop of users asks of it."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scheduler:
    """How an engine fills its steps.

    budget_tokens: most tokens of a step. chunked: whether prompts are cut to fit it. exclusive: whether prefill steps
    hold no decodes (they go first). max_sequences: most requests at once. poll_steps: steps between two looks at the
    queue while something runs. hold_steps, hold_tokens: a prefill waits for company so many steps, or until so many
    prompt tokens wait. reserve_output: whether a request is admitted only when KV for its whole output is free;
    otherwise the youngest is put back when KV runs out. late_steps: steps that are launched before a user's next
    request comes in, as an engine does not wait for its users.
    """

    budget_tokens: int = 8192
    chunked: bool = True
    exclusive: bool = False
    max_sequences: int = 1024
    poll_steps: int = 1
    hold_steps: int = 0
    hold_tokens: int = 0
    reserve_output: bool = False
    late_steps: int = 1


@dataclass(frozen=True, slots=True)
class Workload:
    """A closed loop's requests. Lengths are uniform in [shortest * length, length], drawn with a fixed seed.

    rounds: requests per user. ramp: users that come per step at the start; 0 for all at once.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    shortest: float = 1.0
    rounds: int = 10
    ramp: int = 0

    def lengths(self) -> list[tuple[int, int]]:
        """(input, output) tokens of every request, in the order in which they are sent."""
        draw = random.Random(17)  # noqa: S311
        count = self.concurrency * self.rounds

        def length(tokens: int) -> int:
            return max(draw.randint(int(tokens * self.shortest), tokens), 1)

        return [(length(self.input_tokens), max(length(self.output_tokens), 2)) for _ in range(count)]
