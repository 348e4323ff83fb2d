"""Whether and when a failed call is tried again."""

import pytest

from twostroke.client import ConfigError, RetryPolicy
from twostroke.client._retry import retry_delay_s
from twostroke.errors import (
    DeadlineError,
    EngineError,
    InvalidRequestError,
    KvLostError,
    NoWorkerError,
    OverloadedError,
    StaleEpochError,
    TwostrokeError,
    UnavailableError,
    WorkerLostError,
)

POLICY = RetryPolicy(retries=3, backoff_s=0.5, max_backoff_s=1.0)


def decide(error, **changed):
    facts = {
        "retry_info_s": None,
        "failures": 1,
        "answered": False,
        "remaining_s": None,
        "policy": POLICY,
        "random": lambda: 0.5,
    }
    return retry_delay_s(error, **{**facts, **changed})


@pytest.mark.parametrize(
    ("error", "facts", "delay_s"),
    [
        # Which errors.
        (UnavailableError("x"), {}, 0.25),
        (NoWorkerError("x"), {}, 0.25),
        (WorkerLostError("x"), {}, 0.25),
        (OverloadedError("x"), {"retry_info_s": 2.0}, 2.25),
        (OverloadedError("x"), {"retry_info_s": 0.0}, 0.25),
        (OverloadedError("x"), {}, None),
        (InvalidRequestError("x"), {"retry_info_s": 2.0}, None),
        (DeadlineError("x"), {}, None),
        (EngineError("x"), {}, None),
        (KvLostError("x"), {"retry_info_s": 0.0}, None),
        (StaleEpochError("x"), {"retry_info_s": 0.0}, None),
        (TwostrokeError("x"), {}, None),
        # Never after a part of the answer.
        (UnavailableError("x"), {"answered": True}, None),
        (OverloadedError("x"), {"answered": True, "retry_info_s": 0.1}, None),
        # The wait doubles up to its bound, is random below it, and comes on top of what the router asks for.
        (UnavailableError("x"), {"failures": 2}, 0.5),
        (UnavailableError("x"), {"failures": 3}, 0.5),
        (UnavailableError("x"), {"random": lambda: 0.0}, 0.0),
        (UnavailableError("x"), {"random": lambda: 0.999}, 0.4995),
        (UnavailableError("x"), {"retry_info_s": 5.0, "random": lambda: 0.0}, 5.0),
        # A bounded number of attempts.
        (UnavailableError("x"), {"failures": 4}, None),
        (UnavailableError("x"), {"policy": RetryPolicy(retries=0)}, None),
        (UnavailableError("x"), {"failures": 900, "policy": RetryPolicy(retries=900)}, 0.5),
        # Never beyond the deadline.
        (UnavailableError("x"), {"remaining_s": 0.26}, 0.25),
        (UnavailableError("x"), {"remaining_s": 0.25}, None),
        (UnavailableError("x"), {"remaining_s": -1.0}, None),
        (OverloadedError("x"), {"retry_info_s": 2.0, "remaining_s": 2.0}, None),
    ],
)
def test_decisions(error, facts, delay_s):
    assert decide(error, **facts) == (None if delay_s is None else pytest.approx(delay_s))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"retries": -1}, "retries"),
        ({"retries": 1.5}, "retries"),
        ({"retries": True}, "retries"),
        ({"backoff_s": -0.1}, "backoff_s"),
        ({"backoff_s": "1"}, "backoff_s"),
        ({"max_backoff_s": float("nan")}, "max_backoff_s"),
        ({"max_backoff_s": float("inf")}, "max_backoff_s"),
    ],
)
def test_a_policy_that_cannot_work_names_its_field(arguments, named):
    with pytest.raises(ConfigError, match=rf"^{named} is "):
        RetryPolicy(**arguments)
