"""Time to first token of both systems, in turns, nothing else running."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.bench.load import Connection, requests

# vLLM's workers go on spinning for a second after their last step; nobody else's measurement shall pay for that.
_SETTLE_S = 1.5
_ANSWER_TOKENS = 2

GOAL_FACTOR, GOAL_MS = 1.05, 5.0
"""Two pools may take so many times one engine's time, and so many milliseconds more."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Times of prompts of one length, in milliseconds, in the order of the rounds."""

    prompt_tokens: int
    one_ms: tuple[float, ...]
    two_ms: tuple[float, ...]

    @property
    def medians_ms(self) -> tuple[float, float]:
        """Of one engine and of two pools."""
        return statistics.median(self.one_ms), statistics.median(self.two_ms)

    @property
    def allowed_ms(self) -> float:
        """What two pools may take at most."""
        return GOAL_FACTOR * self.medians_ms[0] + GOAL_MS


async def measure(
    addresses: Sequence[tuple[str, int]], prompt_tokens: int, rounds: int, say: Callable[[str], None]
) -> Timed:
    """Asks both systems `rounds` times, the order turning, each time for a prompt that no cache has. addresses: of one
    engine, of two pools."""
    bodies = requests(f"ttft {prompt_tokens}", prompt_tokens, _ANSWER_TOKENS)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        body = next(bodies)
        for which in (0, 1) if number % 2 == 0 else (1, 0):
            await asyncio.sleep(_SETTLE_S)
            connection = await Connection.open(*addresses[which])
            try:
                answer = await connection.ask(body)
            finally:
                connection.close()
            times[which].append(answer.ttft_s * 1e3)
        say(
            f"{prompt_tokens} tokens, round {number + 1}: "
            f"{times[0][-1]:.0f} ms one engine, {times[1][-1]:.0f} ms two pools"
        )
    return Timed(prompt_tokens, tuple(times[0]), tuple(times[1]))
