"""Whether a worker that answers is set aside, because what it is given fails.

A worker that is gone or silent is found out by its connection. This is for one whose connection and reports are as they
should be while its requests fail: after several in a row it gets nothing new for a while, and then whatever comes next
is the probe. A request counts once, however often it fails here.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from twostroke.errors import TwostrokeError
from twostroke.policy.breaker import Breakers, BreakerSettings, BreakerState

BREAKER = BreakerSettings(failures=3, open_s=0.5, most_open_s=15.0)


class Standing:
    """Of one worker. set_aside: called with the reason when it is to get nothing new."""

    def __init__(self, set_aside: Callable[[str], None]) -> None:
        self._set_aside = set_aside
        self._breakers: Breakers[None] = Breakers(BREAKER)

    @property
    def good(self) -> bool:
        """Whether the worker may be given requests."""
        return self._breakers.state(None, time.monotonic()) is not BreakerState.OPEN

    def failed(self, error: TwostrokeError) -> None:
        """A request failed for the first time on this worker, and the worker is to blame."""
        if self._breakers.failed(None, time.monotonic()):
            self._set_aside(f"requests in a row failed here, the last one: {error.message}")

    def worked(self) -> None:
        """A request got from the worker what it was there for."""
        self._breakers.succeeded(None, time.monotonic())

    def forget(self) -> None:
        """The worker has connected anew."""
        self._breakers.forget(None)
