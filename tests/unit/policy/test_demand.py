from __future__ import annotations

import pytest

from twostroke.policy.demand import WINDOW_S, ObservedDemand
from twostroke.policy.snapshot import Slo

CHAT, BATCH = Slo(0.5, 0.05), Slo(60.0, 1.0)


def test_nothing_is_known_before_the_first_answer() -> None:
    demand = ObservedDemand()
    assert demand.mean(0.0) is None
    demand.arrived(1.0, CHAT)
    assert demand.mean(2.0) is None


def test_means_of_what_came() -> None:
    demand = ObservedDemand()
    for second in range(100):
        demand.arrived(second, CHAT if second % 4 else BATCH)
        demand.arrived(second + 0.5, CHAT)
        demand.served(second + 0.6, 100 if second % 2 else 300, 50, 20)
    found = demand.mean(100.0)
    assert found is not None
    assert found.requests_per_s == pytest.approx(2.0)
    assert (found.prompt_tokens, found.cached_tokens, found.answer_tokens) == (200, 50, 20)
    assert found.prompt_cv2 == pytest.approx(0.25)
    assert found.slo == CHAT


def test_what_is_long_past_does_not_count() -> None:
    demand = ObservedDemand()
    for second in range(300):
        demand.arrived(second, CHAT)
        demand.served(second, 1000 if second < 150 else 10, 0, 5)
    found = demand.mean(300.0)
    assert found is not None
    assert found.prompt_tokens == 10
    assert found.requests_per_s == pytest.approx(1.0, rel=0.05)
    assert demand.mean(300.0 + WINDOW_S) is None


def test_a_demand_that_began_just_now_is_not_spread_over_the_window() -> None:
    demand = ObservedDemand()
    for number in range(100):
        demand.arrived(number / 10, CHAT)
    demand.served(9.9, 10, 0, 10)
    found = demand.mean(10.0)
    assert found is not None
    assert found.requests_per_s == pytest.approx(10.0)
