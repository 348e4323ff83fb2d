"""The attempts of one call, with a clock that the test moves."""

import grpc
import grpc.aio
import pytest

from twostroke.client import (
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    RetryPolicy,
    UnavailableError,
    WorkerLostError,
)
from twostroke.client._attempts import Attempt, Attempts, Routers
from twostroke.errors import TwostrokeError
from twostroke.rpc.status import to_status

REFUSED = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, details="connection refused")


def wire(error: TwostrokeError) -> grpc.aio.AioRpcError:
    """The error as it arrives from a router."""
    details = grpc.aio.Metadata(("grpc-status-details-bin", to_status(error).SerializeToString()))
    (code,) = (code for code in grpc.StatusCode if code.value[0] == error.code)
    return grpc.aio.AioRpcError(code, trailing_metadata=details, details=error.message)


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def make(targets=("a:1", "b:2"), timeout_s=None, retries=3, routers=None, clock=None):
    policy = RetryPolicy(retries=retries, backoff_s=0.5)
    routers = routers or Routers(targets)
    return Attempts("request_id r-1", routers, policy, timeout_s, clock=clock or Clock(), random=lambda: 0.5)


def test_attempts_go_round_the_routers():
    attempts = make(retries=2)
    assert attempts.begin() == Attempt("a:1", None)
    assert attempts.failed(REFUSED) == 0.25
    assert attempts.begin() == Attempt("b:2", None)
    assert attempts.failed(REFUSED) == 0.5
    assert attempts.begin() == Attempt("a:1", None)
    with pytest.raises(UnavailableError, match="connection refused") as caught:
        attempts.failed(REFUSED)
    assert caught.value.__cause__ is REFUSED
    assert caught.value.__notes__ == [
        "request_id r-1, router a:1, attempt 3 of at most 3",
        "before that: attempt 1, router a:1: UNAVAILABLE: connection refused",
        "before that: attempt 2, router b:2: UNAVAILABLE: connection refused",
    ]


def test_the_router_that_answered_is_the_first_of_the_next_call():
    routers = Routers(("a:1", "b:2", "c:3"))
    attempts = make(routers=routers)
    attempts.begin()
    attempts.failed(REFUSED)
    attempts.begin()
    attempts.answered()
    following = make(routers=routers)
    assert following.begin().target == "b:2"
    following.failed(REFUSED)
    assert following.begin().target == "c:3"


def test_the_deadline_runs_from_the_first_attempt_over_all_of_them():
    clock = Clock()
    attempts = make(timeout_s=10.0, clock=clock)
    clock.now_s += 50.0
    assert attempts.begin() == Attempt("a:1", 10.0)
    clock.now_s += 4.0
    attempts.failed(REFUSED)
    clock.now_s += 1.0
    assert attempts.begin() == Attempt("b:2", 5.0)
    attempts.failed(REFUSED)
    clock.now_s += 5.0
    with pytest.raises(DeadlineError, match="no answer within 10 s") as caught:
        attempts.begin()
    assert len(caught.value.__notes__) == 3


def test_a_wait_that_would_pass_the_deadline_ends_the_call_at_once():
    attempts = make(timeout_s=0.25)
    attempts.begin()
    with pytest.raises(UnavailableError):
        attempts.failed(REFUSED)


def test_nothing_is_tried_again_after_the_first_piece():
    attempts = make()
    attempts.begin()
    attempts.answered()
    with pytest.raises(WorkerLostError, match="worker d-1 went away") as caught:
        attempts.failed(wire(WorkerLostError("worker d-1 went away")))
    assert caught.value.__notes__ == ["request_id r-1, router a:1, attempt 1 of at most 4"]


def test_only_retry_info_that_came_over_the_wire_counts():
    attempts = make()
    attempts.begin()
    assert attempts.failed(wire(UnavailableError("draining", retry_after_s=3.0))) == 3.25
    attempts.begin()
    assert attempts.failed(wire(OverloadedError("full", retry_after_s=2.0))) == 2.5
    attempts.begin()
    # What gRPC itself says carries no RetryInfo.
    bare = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, details="bandwidth exhausted")
    with pytest.raises(OverloadedError, match="bandwidth exhausted"):
        attempts.failed(bare)


def test_a_message_that_is_too_large_is_the_senders_mistake():
    """O-72."""
    attempts = make()
    attempts.begin()
    too_large = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, details="message larger than max")
    with pytest.raises(InvalidRequestError, match="raise --rpc-max-message-bytes on both sides"):
        attempts.failed(too_large)
