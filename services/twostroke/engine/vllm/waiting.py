"""How vLLM's processes wait for each other where they share cores with those that compute."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

SPIN_S = 0.0005
LOOK_SHARE = 16
"""A reader looks by itself each time that it has waited for so manieth part longer,"""
LOOK_MS = 8
"""and at least so often while what it waits for may be the end of a step."""
STEP_S = 4.0


class ShortSpin(shm_broadcast.SpinCondition):
    """Spins shortly, then sleeps until it is notified.

    vLLM's own readers spin for a second after every read: with a step more often than that, always. On accelerators
    that saves some microseconds a step. Where cores are shared the engine core of one worker so takes another worker's
    core for as long as its own step lasts, and the first step after a hand-off waits behind both.

    A notification can be lost: its socket holds one, and forgets that it was taken until it next looks, a millisecond
    later; the second of two messages is then only seen when the reader looks by itself, which vLLM's do every 5 s. Here
    it is late by some milliseconds, or, for who was idle, by a sixteenth of that.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, busy_loop_s=SPIN_S, **kwargs)

    def wait(self, timeout_ms: int | None = None) -> None:
        """Returns at a notification, after timeout_ms, or when it is time to look; the caller looks in any case."""
        waited_s = time.monotonic() - self.last_read
        look_ms = 1 + int(waited_s * 1000) // LOOK_SHARE
        if waited_s < STEP_S:
            look_ms = min(look_ms, LOOK_MS)
        super().wait(look_ms if timeout_ms is None else min(timeout_ms, look_ms))


def sleep_between_messages() -> None:
    """From now on this process and those forked from it spin for SPIN_S only."""
    shm_broadcast.SpinCondition = ShortSpin
