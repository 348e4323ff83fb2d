import pytest

from twostroke.bench.stats import Sample, added, cells


def sample(system: str, streams: int = 1, number: int = 0, **changes: object) -> Sample:
    values: dict[str, object] = {
        "system": system,
        "streams": streams,
        "round": number,
        "ttfts_s": (0.010, 0.020, 0.030),
        "tokens": 1000,
        "events": 500,
        "duration_s": 2.0,
        "cpu_s": {"router": 0.02, "front_ends": 0.10, "engines": 1.0, "client": 0.03},
    }
    return Sample(**(values | changes))  # type: ignore[arg-type]


def cpu(router: float, front_ends: float) -> dict[str, float]:
    return {"router": router, "front_ends": front_ends, "engines": 1.0, "client": 0.0}


def test_cpu_is_counted_per_streamed_token() -> None:
    one = sample("x")
    assert one.us_per_token("router") == pytest.approx(20)
    assert one.us_per_token("router", "engines") == pytest.approx(1020)
    assert one.front_us == pytest.approx(120)


def test_a_cell_takes_medians_over_rounds_and_one_over_all_first_tokens() -> None:
    rounds = [
        sample("x", ttfts_s=(0.010, 0.011), duration_s=1.0, cpu_s=cpu(0.01, 0.0)),
        sample("x", number=1, ttfts_s=(0.012,), duration_s=2.0, cpu_s=cpu(0.03, 0.0)),
        sample("x", number=2, ttfts_s=(0.100, 0.200), duration_s=4.0, cpu_s=cpu(0.90, 0.0)),
    ]
    (made,) = cells(rounds)
    assert made.ttft_ms == pytest.approx(12)
    assert (made.ttft_ms_low, made.ttft_ms_high) == pytest.approx((10.5, 150))
    assert made.tokens_per_s == pytest.approx(500)
    assert made.router_us == pytest.approx(30)
    assert made.answers == 5
    assert made.tokens_per_event == pytest.approx(2)


def test_cells_are_ordered_by_streams_then_as_measured_first() -> None:
    measured = [sample("b", 8), sample("a", 8), sample("a", 1, 1), sample("b", 1, 1), sample("b", 8, 2)]
    assert [(made.streams, made.system, made.answers) for made in cells(measured)] == [
        (1, "b", 3),
        (1, "a", 3),
        (8, "b", 6),
        (8, "a", 3),
    ]


def test_added_is_the_difference_to_the_direct_system_at_the_same_number_of_streams() -> None:
    made = cells(
        [
            sample("direct", 1, ttfts_s=(0.010,), cpu_s=cpu(0.0, 0.10)),
            sample("twostroke", 1, ttfts_s=(0.013,), cpu_s=cpu(0.09, 0.05)),
            sample("twostroke", 8, ttfts_s=(0.100,)),
        ]
    )
    difference = added(made, "twostroke", 1)
    assert difference is not None
    assert difference.ttft_ms == pytest.approx(3)
    assert difference.front_us == pytest.approx(40)
    assert added(made, "twostroke", 8) is None
    assert added(made, "vllm-router", 1) is None
