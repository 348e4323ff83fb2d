import pytest

from twostroke.bench import router_report as report
from twostroke.bench.record import Record
from twostroke.bench.stats import Cell


def cell(system: str, ttft_ms: float, front_us: float, streams: int = 8) -> Cell:
    return Cell(
        system=system,
        streams=streams,
        answers=10,
        ttft_ms=ttft_ms,
        ttft_ms_low=ttft_ms,
        ttft_ms_high=ttft_ms,
        tokens_per_s=100.0,
        router_us=front_us / 2,
        front_us=front_us,
        engine_us=500.0,
        client_us=10.0,
        tokens_per_event=1.0,
    )


def checked(cells: list[Cell], streams: tuple[int, ...] = (8,)) -> Record:
    record = Record("router", "command")
    report.checks(record, "tiny", cells, streams, "pip install it")
    return record


def test_what_a_router_adds_is_held_against_what_vllm_router_adds() -> None:
    record = checked([cell("direct", 10, 100), cell("vllm-router", 16, 300), cell("twostroke", 14, 310)])
    ttft, cpu = record.checks
    assert ttft.value == pytest.approx(4)
    assert "6.00 ms" in ttft.goal
    assert ttft.ok
    assert cpu.value == pytest.approx(310)
    assert "300 us" in cpu.goal
    assert not cpu.ok


def test_every_number_of_streams_has_its_own_checks() -> None:
    cells = [cell(name, 10, 100, count) for count in (1, 32) for name in ("direct", "vllm-router", "twostroke")]
    names = [check.name for check in checked(cells, (1, 32)).checks]
    assert len(set(names)) == 4
    assert sum("1 stream)" in name for name in names) == 2
    assert sum("32 streams)" in name for name in names) == 2


def test_without_vllm_router_the_figures_are_kept_and_no_check_is_ok() -> None:
    record = checked([cell("direct", 10, 100), cell("twostroke", 9, 50)])
    assert [check.ok for check in record.checks] == [False, False]
    assert [check.value for check in record.checks] == [pytest.approx(-1), pytest.approx(50)]
    assert all("pip install it" in check.goal for check in record.checks)


def test_rows_show_differences_for_all_but_the_direct_system() -> None:
    record = Record("router", "command")
    report.rows(record, "tiny", [cell("direct", 10, 100), cell("twostroke", 14, 310)])
    direct, ours = record.rows
    assert (direct["added_ttft_ms"], direct["added_front_us"]) == (None, None)
    assert (ours["added_ttft_ms"], ours["added_front_us"]) == (pytest.approx(4), pytest.approx(210))
    assert ours["model"] == "tiny"


@pytest.mark.parametrize(
    ("texts", "ok"),
    [
        ({"direct": "a b", "vllm-router": "a b", "twostroke": "a b"}, True),
        ({"direct": "a b", "vllm-router": "a b", "twostroke": "a c"}, False),
        ({"direct": "a b"}, False),
    ],
)
def test_systems_that_answer_differently_are_not_compared_in_silence(texts: dict[str, str], ok: bool) -> None:
    record = Record("router", "command")
    report.validity(record, "tiny", texts, {})
    assert record.checks[0].ok is ok
    assert record.checks[0].value == sum(text == "a b" for text in texts.values()) - 1


def test_a_system_that_spins_at_rest_is_seen_and_named() -> None:
    record = Record("router", "command")
    report.validity(record, "tiny", {"direct": "a", "twostroke": "a"}, {"direct": 1.0, "twostroke": 90.0})
    _, direct, ours = record.checks
    assert (direct.name, direct.value, direct.ok) == ("CPU of direct at rest (tiny model)", 1.0, True)
    assert (ours.name, ours.value, ours.ok) == ("CPU of twostroke at rest (tiny model)", 90.0, False)
