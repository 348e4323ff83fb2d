import math

import pytest

from twostroke.sim.plots import Axis, Bar, Plot, bars, nice, table


def test_an_axis_places_values_and_clips_what_lies_beyond() -> None:
    plain = Axis("s", 4.0)
    assert [plain.share(value) for value in (-1, 0, 1, 4, 9)] == [0, 0, 0.25, 1, 1]
    assert plain.ticks() == [0, 1, 2, 3, 4]
    log = Axis("ms", 1e4, 10.0, log=True)
    assert [log.share(value) for value in (1, 10, 1e4)] == [0, 0, 1]
    assert log.share(100) == pytest.approx(1 / 3)
    assert log.ticks() == pytest.approx([10, 100, 1000, 10_000])


def test_limits_are_drawn_only_within_the_frame() -> None:
    plot = Plot("t", Axis("x", 10.0), Axis("y", 1.0))
    assert plot.limits() == plot.limits(x=11.0, y=2.0) == ""
    assert plot.limits(x=5.0).count("<line") == 1
    assert plot.limits(x=5.0, y=0.5).count("<line") == 2


def test_a_bar_without_a_value_has_no_length() -> None:
    drawn = bars("t", [Bar("a", 1.0, "1", "#000"), Bar("b", math.nan, "-", "#000")])
    assert 'width="0.0"' in drawn
    assert "nan" not in drawn


def test_tables_escape_what_they_show() -> None:
    assert "<td>a&lt;b</td>" in table(["c"], [["a<b"]])


@pytest.mark.parametrize(("value", "end"), [(0.0, 1.0), (1.0, 1.0), (3.1, 4.0), (0.06, 0.08), (9.0, 10.0)])
def test_axes_end_at_round_numbers(value: float, end: float) -> None:
    assert nice(value) == pytest.approx(end)
