"""Whether a failed call is tried again, and when. No I/O, no clock, no global random numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.errors import Code, ConfigError, TwostrokeError


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how fast a call is tried again.

    retries: attempts after the first one; 0 never retries.
    backoff_s: upper bound of the first random wait; it doubles with every failure.
    max_backoff_s: where the doubling ends. A longer wait that a router asks for is kept.

    Raises ConfigError naming the field that cannot work.
    """

    retries: int = 3
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.retries, int) or isinstance(self.retries, bool) or self.retries < 0:
            raise ConfigError(f"retries is {self.retries!r}; it must be 0 or a positive integer")
        for name in ("backoff_s", "max_backoff_s"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise ConfigError(f"{name} is {value!r}; it must be 0 or a positive number of seconds")


DEFAULT_RETRIES = RetryPolicy()


def retry_delay_s(
    error: TwostrokeError,
    *,
    retry_info_s: float | None,
    failures: int,
    answered: bool,
    remaining_s: float | None,
    policy: RetryPolicy,
    random: Callable[[], float],
) -> float | None:
    """Seconds to wait before the next attempt, or None to give up.

    error: why the latest attempt failed.
    retry_info_s: the least wait that the router asked for; None when it asked for none.
    failures: failed attempts so far, the latest one included.
    answered: a part of the answer has arrived, so that another attempt could repeat text.
    remaining_s: time left before the deadline; None without one.
    random: uniform numbers in [0, 1).
    """
    if answered or failures > policy.retries or not _retryable(error, retry_info_s):
        return None
    bound_s = min(policy.max_backoff_s, policy.backoff_s * 2.0 ** (failures - 1))
    delay_s = (retry_info_s or 0.0) + bound_s * random()
    if remaining_s is not None and delay_s >= remaining_s:
        return None
    return delay_s


def _retryable(error: TwostrokeError, retry_info_s: float | None) -> bool:
    if error.code == Code.UNAVAILABLE:
        return True
    # Without RetryInfo it may as well be a message that is too large, which no wait makes smaller.
    return error.code == Code.RESOURCE_EXHAUSTED and retry_info_s is not None
