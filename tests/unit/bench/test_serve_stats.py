import math

import pytest

from twostroke.bench.serve.play import Seen
from twostroke.bench.serve.stats import ALL, DURING, Played, figures, gaps_during_prefill, medians
from twostroke.bench.serve.traffic import CHAT, DOCUMENT, Arrival
from twostroke.measures import SloLimits

SLOS = {CHAT: SloLimits(ttft_s=1.0, itl_s=0.25), DOCUMENT: SloLimits(ttft_s=5.0)}


def seen(kind: str, arrival_s: float, *tokens_s: float, error: str = "") -> Seen:
    return Seen(Arrival(arrival_s, kind, 10, len(tokens_s)), arrival_s, tokens_s, error)


def played(*requests: Seen, cpu_s: float = 3.0) -> Played:
    return Played("one", "mixed", 0, requests, cpu_s, 0.1, 0.2)


def test_figures_are_those_of_the_metric_dictionary() -> None:
    found = figures(
        played(
            seen(CHAT, 0.0, 0.5, 0.6, 0.7),
            seen(CHAT, 2.0, 3.5, 3.6),
            seen(CHAT, 3.0, error="503"),
            seen(DOCUMENT, 4.0, 8.0, 8.5),
        ),
        SLOS,
    )
    chat, every = found[CHAT], found[ALL]
    assert (chat["requests"], chat["failed"]) == (3, 1)
    assert chat["ttft_p50_s"] == pytest.approx(0.5)
    assert chat["ttft_max_s"] == pytest.approx(1.5)
    assert chat["itl_p50_ms"] == pytest.approx(100)
    assert chat["attainment"] == pytest.approx(1 / 3)
    assert chat["goodput"] == pytest.approx(1 / 4)
    assert every["goodput"] == pytest.approx(2 / 4)
    assert every["tokens_per_s"] == pytest.approx(7 / 8.5)
    assert every["cpu_s"] == 3.0
    assert found[DOCUMENT]["ttft_p50_s"] == pytest.approx(4.0)
    assert DURING not in found


def test_a_long_gap_is_a_stall_and_may_cost_the_slo() -> None:
    steady = seen(CHAT, 0.0, 0.5, 0.6, 0.7, 0.8)
    halting = seen(CHAT, 1.0, 1.5, 2.5, 3.5, 3.6)
    found = figures(played(steady, halting), SLOS)[CHAT]
    assert found["stall_share"] == pytest.approx(2.0 / 2.4)
    assert found["itl_max_ms"] == pytest.approx(1000)
    assert found["attainment"] == 0.5


def test_only_gaps_that_overlap_a_prefill_count_as_during_one() -> None:
    chat = seen(CHAT, 0.0, 1.0, 2.0, 4.5, 6.0, 7.0)
    document = seen(DOCUMENT, 3.0, 5.0, 9.0)
    assert gaps_during_prefill([chat, document]) == pytest.approx([2.5, 1.5])
    never_read = seen(DOCUMENT, 6.5, error="lost")
    assert gaps_during_prefill([chat, never_read]) == pytest.approx([1.0])
    assert figures(played(chat, document), SLOS)[DURING]["itl_max_ms"] == pytest.approx(2500)


def test_medians_leave_out_figures_that_do_not_exist() -> None:
    rounds = [{CHAT: {"ttft_p50_s": value, "none": math.nan}} for value in (1.0, 9.0, 2.0, math.nan)]
    found = medians(rounds)
    assert found[CHAT]["ttft_p50_s"] == 2.0
    assert math.isnan(found[CHAT]["none"])
    assert list(found) == [CHAT]


def test_a_mix_of_which_nothing_was_answered_has_figures_still() -> None:
    found = figures(played(seen(CHAT, 0.0, error="x"), seen(CHAT, 1.0, error="x")), SLOS)
    assert (found[ALL]["failed"], found[ALL]["goodput"], found[ALL]["tokens_per_s"]) == (2, 0, 0)
    assert math.isnan(found[CHAT]["ttft_p99_s"])
