from array import array

import pytest

from twostroke.bench.fault_load import Tally
from twostroke.bench.fault_plan import KINDS, Fault, goodput, kind_rows, percentile, recoveries
from twostroke.bench.record import Record

KILL, STOP = Fault("kill worker", 10.0, 11.0), Fault("stop router", 20.0, 22.0)


def test_a_stream_recovers_from_the_fault_that_its_gap_holds() -> None:
    gaps = [(9.9, 10.6), (10.1, 11.0), (19.0, 21.5), (30.0, 31.0)]
    assert recoveries(gaps, [KILL, STOP]) == [
        (pytest.approx(0.6), "kill worker"),
        (pytest.approx(1.0), "kill worker"),
        (pytest.approx(1.5), "stop router"),
    ], "a token may be on its way when the fault begins; what no fault explains is none"


def test_waits_count_from_the_length_that_nothing_else_explains() -> None:
    tally = Tally()
    tally.waited(0.0, 0.9, first=True)
    tally.waited(0.9, 1.1, first=False)
    assert tally.gaps == []
    tally.waited(1.1, 1.4, first=False)
    tally.waited(0.0, 1.1, first=True)
    assert tally.gaps == [(1.1, 1.4), (0.0, 1.1)]


def test_goodput_is_that_of_the_faults_over_that_before() -> None:
    moments = array("d", [*(i / 10 for i in range(50)), 10.2, 10.4, 10.8, 20.5, 21.0, 21.5, 25.0])
    assert goodput(moments, [KILL, STOP], (0.0, 5.0)) == pytest.approx((6 / 3) / (50 / 5))
    assert goodput([], [KILL], (0.0, 5.0)) is None


def test_rows_name_each_kind_that_was_done() -> None:
    record = Record("faults", "")
    slowest = kind_rows(record, "ours", [(9.9, 10.6), (9.9, 10.7)], [KILL, KILL, STOP])
    assert slowest == pytest.approx(0.7)
    assert [(row["fault"], row["times"], row["streams_held_up"]) for row in record.rows] == [
        ("kill worker", 2, 2),
        ("stop router", 1, 0),
    ]
    assert record.rows[1]["recovery_p99_s"] is None
    assert {row["fault"] for row in record.rows} <= set(KINDS)


def test_a_percentile_of_nothing_is_none() -> None:
    assert percentile([], 0.99) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile([1.0, 2.0], 0.99) == 2.0
