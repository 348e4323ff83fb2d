"""Whether a worker or a link still gets traffic after it failed."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class BreakerState(Enum):
    """How a breaker stands."""

    CLOSED = "closed"
    """Traffic flows."""
    OPEN = "open"
    """No traffic."""
    HALF_OPEN = "half-open"
    """One request at a time may try."""


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long.

    failures: in a row; one success in between starts the count again.
    forget_s: a failure longer ago than this begins a new row.
    open_s: how long it stays open; twice as long after every probe that fails, up to most_open_s.
    probe_s: a probe of which nothing is heard for so long is taken as lost, and another may try.
    """

    failures: int = 3
    forget_s: float = 60.0
    open_s: float = 2.0
    most_open_s: float = 60.0
    probe_s: float = 30.0


@dataclass(slots=True)
class _Breaker:
    failed: int = 0
    failed_s: float = 0.0
    opened: int = 0
    """Times it opened since it was last closed; 0 while it is closed."""
    until_s: float = 0.0
    probing_until_s: float = float("-inf")


class Breakers(Generic[K]):
    """Breakers by key: a worker, or a (prefill, decode) pair. Keys that never failed cost nothing.

    All moments are of the monotonic clock and are passed in.
    """

    def __init__(self, settings: BreakerSettings | None = None) -> None:
        self._settings = settings or BreakerSettings()
        self._breakers: dict[K, _Breaker] = {}

    def __len__(self) -> int:
        """Keys that failed and have not worked since."""
        return len(self._breakers)

    def failed(self, key: K, now_s: float) -> bool:
        """Something failed for which the key is to blame. Returns whether this opened its breaker.

        A slow reply is no failure; one that did not come within its time is.
        """
        settings = self._settings
        breaker = self._breakers.setdefault(key, _Breaker())
        if breaker.opened and now_s < breaker.until_s:
            # What was under way when it opened; it says nothing new.
            return False
        if now_s - breaker.failed_s > settings.forget_s and not breaker.opened:
            breaker.failed = 0
        breaker.failed += 1
        breaker.failed_s = now_s
        if not breaker.opened and breaker.failed < settings.failures:
            return False
        open_s = min(settings.most_open_s, settings.open_s * 2**breaker.opened)
        breaker.opened += 1
        breaker.until_s = now_s + open_s
        breaker.probing_until_s = float("-inf")
        return True

    def succeeded(self, key: K, now_s: float) -> bool:
        """Something worked. Returns whether this closed its breaker.

        Successes of what was under way when it opened do not close it.
        """
        breaker = self._breakers.get(key)
        if breaker is None or (breaker.opened and now_s < breaker.until_s):
            return False
        del self._breakers[key]
        return breaker.opened > 0

    def state(self, key: K, now_s: float) -> BreakerState:
        """How a key's breaker stands."""
        breaker = self._breakers.get(key)
        if breaker is None or not breaker.opened:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_s < breaker.until_s else BreakerState.HALF_OPEN

    def ready(self, key: K, now_s: float) -> bool:
        """Whether the key may be sent something now."""
        state = self.state(key, now_s)
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and now_s >= self._breakers[key].probing_until_s
        )

    def sent(self, key: K, now_s: float) -> None:
        """Something was sent: in a half-open breaker it is the probe."""
        if self.state(key, now_s) is BreakerState.HALF_OPEN:
            self._breakers[key].probing_until_s = now_s + self._settings.probe_s

    def forget(self, key: K) -> None:
        """The key is gone, or is another one by now: a worker that restarted."""
        self._breakers.pop(key, None)
