"""Asks at the times of a mix, whatever becomes of earlier requests, and keeps what the clients saw."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twostroke.bench.load import Answer, Connection
from twostroke.bench.serve.traffic import Arrival
from twostroke.errors import UnavailableError


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as its client saw it; times are seconds from the start of the mix."""

    arrival: Arrival
    sent_s: float
    tokens_s: tuple[float, ...] = ()
    """When each token came; none when the request failed."""
    error: str = ""

    @property
    def ttft_s(self) -> float:
        """To the first token; NaN when the request failed."""
        return self.tokens_s[0] - self.sent_s if self.tokens_s else float("nan")

    @property
    def gaps_s(self) -> list[float]:
        """Between tokens that follow one another."""
        return [later - earlier for earlier, later in zip(self.tokens_s, self.tokens_s[1:], strict=False)]


async def play(
    address: tuple[str, int], arrivals: Sequence[Arrival], bodies: Sequence[bytes], began: Callable[[], None]
) -> list[Seen]:
    """Sends every body at its time, each on a connection of its own, and waits for all answers. Its kind is the class
    that a request names.

    `began` is called at the start of the mix. A request that fails is part of the result. Nothing is parsed before the
    last answer has ended. Cancellation closes all connections.
    """
    started_s = time.monotonic()
    began()
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_ask(address, started_s + arrival.arrival_s, body, arrival.kind))
            for arrival, body in zip(arrivals, bodies, strict=True)
        ]
    return [_seen(arrival, started_s, *task.result()) for arrival, task in zip(arrivals, tasks, strict=True)]


async def _ask(address: tuple[str, int], at_s: float, body: bytes, slo: str) -> tuple[float, Answer | str]:
    """When it was sent, and the answer or what went wrong."""
    await asyncio.sleep(at_s - time.monotonic())
    sent_s = time.monotonic()
    try:
        connection = await Connection.open(*address)
    except OSError as error:
        return sent_s, str(error)
    try:
        return sent_s, await connection.ask(body, slo)
    except UnavailableError as error:
        return sent_s, error.message
    finally:
        connection.close()


def _seen(arrival: Arrival, started_s: float, sent_s: float, answer: Answer | str) -> Seen:
    if isinstance(answer, str):
        return Seen(arrival, sent_s - started_s, error=answer)
    try:
        tokens_s = tuple(at_s - started_s for at_s in answer.token_times_s())
    except UnavailableError as error:
        return Seen(arrival, sent_s - started_s, error=error.message)
    if len(tokens_s) != arrival.output_tokens:
        error_text = f"the answer has {len(tokens_s)} tokens instead of {arrival.output_tokens}"
        return Seen(arrival, sent_s - started_s, error=error_text)
    return Seen(arrival, sent_s - started_s, tokens_s)
