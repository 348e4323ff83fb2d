"""Short prompts and long ones on the same prefill worker."""

import asyncio
import time

from cluster.reference_cluster import Cluster, request, running
from twostroke.engine.reference_model import expected_tokens

STEP_S = 0.05
LONG = list(range(64 * 40))
FLAGS = ("--step-budget-tokens", "64", "--reference-step-ms", str(STEP_S * 1000), "--reference-token-us", "0")


async def first_token_s(cluster: Cluster, prompt: list[int]) -> float:
    begun_s = time.monotonic()
    async for piece in cluster.stream(request(prompt, 4)):
        if piece.token_ids:
            return time.monotonic() - begun_s
    raise AssertionError("no token came")


async def test_a_short_prompt_takes_about_a_step_while_a_long_one_is_read() -> None:
    short = list(range(5000, 5032))
    async with running(own_flags={"prefill-0": FLAGS}) as cluster:
        begun_s = time.monotonic()
        long = asyncio.create_task(cluster.ask(request(LONG, 4)))
        await cluster.until(lambda view: any(w.load.computed_prompt_tokens > 0 for w in view.workers))
        waits_s = [await first_token_s(cluster, [number, *short]) for number in range(6)]
        assert not long.done()
        answer = await long
        took_s = time.monotonic() - begun_s
    assert answer.token_ids == expected_tokens(LONG, count=4)
    # A prompt waits for the step that runs, and for its own; forty are left of the long one's.
    assert sorted(waits_s)[3] < 8 * STEP_S
    assert took_s < 2 * 40 * STEP_S, "the long one had the rest of every step"
