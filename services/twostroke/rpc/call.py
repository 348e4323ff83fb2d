"""Waiting for the answer of a call."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


def quiet(call: Awaitable[T]) -> asyncio.Future[T]:
    """The call as a future whose error nobody has to ask for."""
    future = asyncio.ensure_future(call)
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def answer(call: Awaitable[T]) -> T:
    """The answer of a call. Cancellation is heeded even in the moment in which the call breaks, which else hides it."""
    waiting = quiet(call)
    try:
        await asyncio.wait({waiting})
    finally:
        waiting.cancel()
    return waiting.result()
