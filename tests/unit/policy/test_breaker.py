import random

from twostroke.policy.breaker import Breakers, BreakerSettings, BreakerState

SETTINGS = BreakerSettings(failures=3, forget_s=60, open_s=2, most_open_s=10, probe_s=5)


def opened() -> Breakers[str]:
    breakers: Breakers[str] = Breakers(SETTINGS)
    assert [breakers.failed("w", second) for second in (0, 1, 2)] == [False, False, True]
    return breakers


def test_it_opens_after_failures_in_a_row_only() -> None:
    breakers: Breakers[str] = Breakers(SETTINGS)
    for second in range(100):
        breakers.failed("w", second)
        breakers.failed("w", second + 0.1)
        breakers.succeeded("w", second + 0.2)
        assert breakers.ready("w", second + 0.3), "one late reply among good ones marks nobody dead"
    breakers.failed("w", 200)
    breakers.failed("w", 201)
    assert not breakers.failed("w", 300), "failures of long ago do not count"
    assert breakers.ready("w", 300)


def test_an_open_one_takes_nothing_then_one_probe_at_a_time() -> None:
    breakers = opened()
    assert breakers.state("w", 3.9) is BreakerState.OPEN
    assert not breakers.ready("w", 3.9)
    assert breakers.ready("other", 3.9)
    assert breakers.state("w", 4) is BreakerState.HALF_OPEN
    assert breakers.ready("w", 4)
    breakers.sent("w", 4)
    assert not breakers.ready("w", 4.1), "the probe is under way"
    assert breakers.succeeded("w", 4.2)
    assert breakers.state("w", 4.2) is BreakerState.CLOSED
    assert not breakers.failed("w", 4.3), "the count began again"


def test_a_failed_probe_opens_it_for_twice_as_long_up_to_a_bound() -> None:
    breakers, now_s, lengths = opened(), 2.0, []
    for _ in range(5):
        until_s = next(now_s + tick / 10 for tick in range(1000) if breakers.ready("w", now_s + tick / 10))
        lengths.append(round(until_s - now_s, 1))
        breakers.sent("w", until_s)
        assert breakers.failed("w", until_s)
        now_s = until_s
    assert lengths == [2, 4, 8, 10, 10]


def test_a_probe_of_which_nothing_is_heard_does_not_block_for_ever() -> None:
    breakers = opened()
    breakers.sent("w", 4)
    assert not breakers.ready("w", 8.9)
    assert breakers.ready("w", 9)


def test_what_was_under_way_when_it_opened_changes_nothing() -> None:
    breakers = opened()
    assert not breakers.failed("w", 2.5)
    assert not breakers.succeeded("w", 2.6)
    assert breakers.state("w", 3.9) is BreakerState.OPEN
    assert breakers.ready("w", 4)


def test_fifty_good_ones_follow_one_failure() -> None:
    """O-80: a mark that nobody takes away."""
    breakers: Breakers[tuple[str, str]] = Breakers(BreakerSettings(failures=1))
    assert breakers.failed(("p", "d"), 0)
    served, now_s = 0, 0.0
    while served < 50:
        now_s += 0.1
        assert now_s < 10
        if breakers.ready(("p", "d"), now_s):
            breakers.sent(("p", "d"), now_s)
            breakers.succeeded(("p", "d"), now_s)
            served += 1
    assert breakers.ready(("p", "other"), 0), "a pair's failures are not its workers'"


def test_a_worker_that_fails_always_gets_few_of_many_requests() -> None:
    """O-85: 200 requests, one worker with the best cache that fails every one."""
    breakers: Breakers[str] = Breakers(SETTINGS)
    rng, sent = random.Random(1), 0
    for number in range(200):
        now_s = number * 0.1
        if breakers.ready("bad", now_s):
            sent += 1
            breakers.sent("bad", now_s)
            breakers.failed("bad", now_s + rng.random() * 0.05)
    assert 4 <= sent <= 6


def test_a_worker_that_restarted_begins_anew() -> None:
    breakers = opened()
    breakers.forget("w")
    assert breakers.ready("w", 2.1)
