"""The error tree. Everything that goes wrong on purpose is one of these.

    TwostrokeError
      ConfigError                a setting is wrong; never crosses a wire
      InvalidRequestError        the request cannot be served by anyone
        UnsupportedFieldError      it asks for something we do not do
        PromptTooLongError         it does not fit the model
        UnknownModelError          it names a model that is not served
      UnauthenticatedError       the caller has not said who it is
        PermissionDeniedError      it may not do this
      OverloadedError            no room now
        RateLimitedError           the caller has had its share
      UnavailableError           the other side is not there
        NoWorkerError              no worker can take the request
        WorkerLostError            the worker went away with the request
        AnswerLostError            it took an answer along that cannot be drawn again
      StaleEpochError            the worker restarted since it was chosen
      LayoutMismatchError        two workers cannot exchange KV
      KvLostError                the KV was freed before it was read
      KvCorruptError             the KV that arrived is not the KV that was sent
      DeadlineError              time ran out
      EngineError                the engine failed

Each class carries its canonical status code (google.rpc.Code), a reason in UPPER_SNAKE_CASE that programs may match on,
and whether a retry makes sense. `rpc/status.py` is the only place that turns them into gRPC statuses and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar


class Code(IntEnum):
    """The canonical status codes that are used here, by their google.rpc.Code numbers."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


HTTP_STATUS: Mapping[Code, int] = {
    Code.INVALID_ARGUMENT: 400,
    Code.UNAUTHENTICATED: 401,
    Code.PERMISSION_DENIED: 403,
    Code.NOT_FOUND: 404,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.UNAVAILABLE: 503,
    Code.DEADLINE_EXCEEDED: 504,
}
"""Over HTTP; what is not here is a 500."""


class TwostrokeError(Exception):
    """Root of the tree.

    message: one sentence that says what happened and, where someone can, what to change.
    retry_after_s: seconds after which a retry makes sense; None when it does not.
    """

    code: ClassVar[Code] = Code.INTERNAL
    reason: ClassVar[str] = "INTERNAL"
    default_retry_after_s: ClassVar[float | None] = None

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_s = self.default_retry_after_s if retry_after_s is None else retry_after_s


class ConfigError(TwostrokeError):
    """A setting is wrong."""

    code = Code.FAILED_PRECONDITION
    reason = "CONFIG"


class InvalidRequestError(TwostrokeError):
    """The request cannot be served by anyone."""

    code = Code.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class UnsupportedFieldError(InvalidRequestError):
    """The request asks for something that is not done here."""

    reason = "UNSUPPORTED_FIELD"


class PromptTooLongError(InvalidRequestError):
    """The prompt does not fit the model."""

    reason = "PROMPT_TOO_LONG"


class UnknownModelError(InvalidRequestError):
    """The request names a model that is not served."""

    code = Code.NOT_FOUND
    reason = "UNKNOWN_MODEL"


class UnauthenticatedError(TwostrokeError):
    """The caller has not said who it is."""

    code = Code.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDeniedError(UnauthenticatedError):
    """The caller may not do this."""

    code = Code.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class OverloadedError(TwostrokeError):
    """No room now."""

    code = Code.RESOURCE_EXHAUSTED
    reason = "OVERLOADED"
    default_retry_after_s = 1.0


class RateLimitedError(OverloadedError):
    """The caller has had its share."""

    reason = "RATE_LIMITED"


class UnavailableError(TwostrokeError):
    """The other side is not there."""

    code = Code.UNAVAILABLE
    reason = "UNAVAILABLE"
    default_retry_after_s = 1.0


class NoWorkerError(UnavailableError):
    """No worker can take the request."""

    reason = "NO_WORKER"


class WorkerLostError(UnavailableError):
    """The worker went away with the request."""

    reason = "WORKER_LOST"


class AnswerLostError(UnavailableError):
    """The worker took an answer along that cannot be drawn again."""

    reason = "ANSWER_LOST"


class StaleEpochError(TwostrokeError):
    """The worker restarted since it was chosen."""

    code = Code.FAILED_PRECONDITION
    reason = "STALE_EPOCH"
    default_retry_after_s = 0.0


class LayoutMismatchError(TwostrokeError):
    """Two workers cannot exchange KV."""

    code = Code.FAILED_PRECONDITION
    reason = "LAYOUT_MISMATCH"


class KvLostError(TwostrokeError):
    """The KV was freed before it was read."""

    code = Code.FAILED_PRECONDITION
    reason = "KV_LOST"
    default_retry_after_s = 0.0


class KvCorruptError(TwostrokeError):
    """The KV that arrived is not the KV that was sent."""

    code = Code.DATA_LOSS
    reason = "KV_CORRUPT"
    default_retry_after_s = 0.0


class DeadlineError(TwostrokeError):
    """Time ran out."""

    code = Code.DEADLINE_EXCEEDED
    reason = "DEADLINE"


class EngineError(TwostrokeError):
    """The engine failed."""

    code = Code.INTERNAL
    reason = "ENGINE_FAILED"


def _tree(root: type[TwostrokeError]) -> dict[str, type[TwostrokeError]]:
    found = {root.reason: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


def by_reason(reason: str) -> type[TwostrokeError] | None:
    """The class with that reason, or None for a reason of a newer version."""
    return _tree(TwostrokeError).get(reason)
