"""Seeded requests whose prompt takes more than one step, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any


def rewind_on_cpu(runner: Any) -> None:
    """Makes a model runner leave the generators of unfinished prompts as they were.

    A step samples for every sequence, and vLLM takes back what it drew for prompts that go on by setting the
    generator's offset. Generators of the CPU have none: the call ends the engine. Here their state is kept instead.
    """
    sample: Callable[..., Any] = runner._sample
    keep_books: Callable[..., Any] = runner._bookkeeping_sync

    def unfinished() -> dict[int, Any]:
        batch = runner.input_batch
        goes_on = runner.discard_request_mask.np[: batch.num_reqs]
        return {index: each for index, each in batch.generators.items() if index < batch.num_reqs and goes_on[index]}

    @wraps(sample)
    def sampled(*args: Any, **kwargs: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in unfinished().values()]
        result = sample(*args, **kwargs)
        for generator, state in states:
            generator.set_state(state)
        return result

    @wraps(keep_books)
    def kept(*args: Any, **kwargs: Any) -> Any:
        hidden, generators = unfinished(), runner.input_batch.generators
        for index in hidden:
            del generators[index]
        try:
            return keep_books(*args, **kwargs)
        finally:
            generators.update(hidden)

    runner._sample, runner._bookkeeping_sync = sampled, kept
