"""When a step counts as overdue."""

from twostroke.policy.step_watch import FACTOR, StepWatch


def test_nothing_is_overdue_while_there_is_nothing_to_compute() -> None:
    watch = StepWatch(1.0)
    assert watch.overdue_s(1e9) == 0
    watch.given(0.0)
    watch.stepped(0.5, busy=False)
    assert watch.overdue_s(1e9) == 0


def test_a_step_is_overdue_after_the_floor() -> None:
    watch = StepWatch(2.0)
    watch.given(10.0)
    watch.given(11.0)
    assert watch.overdue_s(12.0) == 0
    assert watch.overdue_s(12.5) == 0.5


def test_an_engine_with_long_steps_gets_more_time_and_forgets_it() -> None:
    watch = StepWatch(2.0)
    watch.given(0.0)
    watch.stepped(5.0, busy=True)
    assert watch.limit_s == 5.0 * FACTOR
    assert watch.overdue_s(5.0 + 99.0) == 0
    for step in range(64):
        watch.stepped(5.0 + 0.01 * (step + 1), busy=True)
    assert watch.limit_s == 2.0


def test_a_cancelled_request_is_not_waited_for() -> None:
    watch = StepWatch(1.0)
    watch.given(0.0)
    watch.idle()
    assert watch.overdue_s(100.0) == 0
