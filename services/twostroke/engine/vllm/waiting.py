"""How vLLM's processes wait for each other where they share cores with those that compute."""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators import shm_broadcast

SPIN_S = 0.0005
CONNECTED_S = 5.0
"""After so long a queue's wake-up socket is surely connected; until then only spinning sees every message."""


class ShortSpin(shm_broadcast.SpinCondition):
    """Spins shortly, then sleeps until it is notified.

    vLLM's own readers spin for a second after every read: with a step more often than that, always. On accelerators
    that saves some microseconds a step. Where cores are shared the engine core of one worker so takes another worker's
    core for as long as its own step lasts, and the first step after a hand-off waits behind both.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._made_s = time.monotonic()

    def record_read(self) -> None:
        """A message was read; others follow soon, or with the next step."""
        super().record_read()
        if self.last_read - self._made_s > CONNECTED_S:
            self.busy_loop_s = SPIN_S


def sleep_between_messages() -> None:
    """From now on this process and those forked from it spin for SPIN_S only."""
    shm_broadcast.SpinCondition = ShortSpin
