from twostroke.policy.pace import REMEMBERED, Pace


def test_nothing_is_predicted_before_something_was_seen() -> None:
    pace = Pace()
    assert (pace.prefill_s(100_000), pace.answer_s(1000)) == (0, 0)
    pace.read(0, 1.0)
    pace.wrote(0, 1.0)
    assert (pace.prefill_s(100_000), pace.answer_s(1000)) == (0, 0), "a cached prompt and a single token say nothing"


def test_the_best_of_late_counts() -> None:
    pace = Pace()
    pace.read(1000, 0.5)
    pace.read(10, 0.5)
    pace.wrote(10, 0.1)
    pace.wrote(10, 0.3)
    assert pace.prefill_s(2000) == 1.0
    assert pace.answer_s(101) == 1.0
    assert pace.answer_s(0) == 0.0


def test_what_was_long_ago_does_not() -> None:
    pace = Pace()
    pace.read(1000, 0.1)
    for _ in range(REMEMBERED):
        pace.read(1000, 1.0)
    assert pace.prefill_s(1000) == 1.0
