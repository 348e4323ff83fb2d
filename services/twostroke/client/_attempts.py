"""The attempts of one call: which router is next, how much time is left, and what ends it. No I/O."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import grpc

from twostroke.client._retry import RetryPolicy, retry_delay_s
from twostroke.errors import DeadlineError, TwostrokeError
from twostroke.rpc.status import to_error


class Routers:
    """The routers of a client, and the one that answered last, where the next call begins."""

    def __init__(self, targets: tuple[str, ...]) -> None:
        self.targets = targets
        self._first = 0

    def pick(self, failures: int, first: int) -> str:
        """The router to try after that many failures of a call that began with `first`."""
        return self.targets[(first + failures) % len(self.targets)]

    @property
    def first(self) -> int:
        """Index of the router where a new call begins."""
        return self._first

    def answered(self, target: str) -> None:
        """Makes that router the first of the following calls."""
        self._first = self.targets.index(target)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One RPC to make.

    timeout_s: what is left of the whole call's time; None without a deadline.
    """

    target: str
    timeout_s: float | None


class Attempts:
    """One call over all its attempts. The deadline runs from the first `begin`.

    call: how errors name the call.
    clock: seconds, monotonic.
    random: uniform numbers in [0, 1).
    """

    def __init__(
        self,
        call: str,
        routers: Routers,
        policy: RetryPolicy,
        timeout_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._call = call
        self._routers = routers
        self._first = routers.first
        self._policy = policy
        self._timeout_s = timeout_s
        self._clock = clock
        self._random = random
        self._deadline = math.inf
        self._target = ""
        self._failures: list[str] = []
        self._answered = False

    def begin(self) -> Attempt:
        """The next attempt. Raises DeadlineError when no time is left for it."""
        if not self._target and self._timeout_s is not None:
            self._deadline = self._clock() + self._timeout_s
        remaining_s = self._remaining_s()
        if remaining_s is not None and remaining_s <= 0:
            raise self._explained(DeadlineError(f"no answer within {self._timeout_s:g} s"))
        self._target = self._routers.pick(len(self._failures), self._first)
        return Attempt(self._target, remaining_s)

    def answered(self) -> None:
        """Tells that a part of the answer has arrived: from here on nothing is tried again."""
        if not self._answered:
            self._answered = True
            self._routers.answered(self._target)

    def failed(self, rpc_error: grpc.RpcError) -> float:
        """Seconds to wait before the next `begin`. Raises the typed error when there is no further attempt."""
        error = to_error(rpc_error)
        delay_s = retry_delay_s(
            error,
            retry_info_s=error.retry_after_s if _has_details(rpc_error) else None,
            failures=len(self._failures) + 1,
            answered=self._answered,
            remaining_s=self._remaining_s(),
            policy=self._policy,
            random=self._random,
        )
        if delay_s is None:
            raise self._explained(error) from rpc_error
        self._failures.append(f"attempt {len(self._failures) + 1}, router {self._target}: {error.reason}: {error}")
        return delay_s

    def broken(self, message: str) -> TwostrokeError:
        """The error for an answer that breaks the contract."""
        return self._explained(TwostrokeError(message))

    def _remaining_s(self) -> float | None:
        return None if self._deadline == math.inf else self._deadline - self._clock()

    def _explained(self, error: TwostrokeError) -> TwostrokeError:
        attempt = f"attempt {len(self._failures) + 1} of at most {self._policy.retries + 1}"
        error.add_note(f"{self._call}, router {self._target}, {attempt}")
        for failure in self._failures:
            error.add_note(f"before that: {failure}")
        return error


def _has_details(rpc_error: grpc.RpcError) -> bool:
    # The defaults of the error classes are a server's advice; only what really came over the wire counts here.
    metadata = cast("Iterable[tuple[str, str | bytes]] | None", rpc_error.trailing_metadata())
    return any(key == "grpc-status-details-bin" for key, _ in metadata or ())
