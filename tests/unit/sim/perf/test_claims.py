"""The claims' table."""

import math

import pytest

from twostroke.measures import SloLimits
from twostroke.policy.step_model import LinearStepModel
from twostroke.sim.perf.claims import Laboratory, one_pool, two_pools
from twostroke.sim.perf.claims_command import table
from twostroke.sim.perf.claims_prompt import Claim, kv_of_50k, long_prompt, prefill_s


def test_the_kv_of_a_long_prompt_is_far_more_than_claimed() -> None:
    line = kv_of_50k()
    assert line.untuned == pytest.approx(327.7, rel=0.01)
    assert line.tuned == pytest.approx(line.untuned / 8)
    assert line.two_pools == pytest.approx(4.1, rel=0.01)
    assert line.verdict.startswith("refuted as a total")
    assert line.smallest == "82 links of 400 Gb/s"


def test_two_pools_save_only_the_interleaving() -> None:
    line = long_prompt()
    assert 2.5 < line.two_pools < line.untuned < line.tuned
    assert line.verdict.startswith("does not hold with equal GPUs")


def test_small_chunks_pay_for_every_step() -> None:
    model = LinearStepModel(0.01, 0.0, 0.0, 1e-5)
    assert prefill_s(model, 1000) == pytest.approx(0.02)
    assert prefill_s(model, 1000, 300) == pytest.approx(0.05)


def test_a_pool_of_decoders_has_no_prompt_in_its_gaps() -> None:
    laboratory = Laboratory(30)
    slo = SloLimits(ttft_s=10.0)
    whole = laboratory.run(one_pool(8192), "8192/64", 2.0, slo)
    apart = laboratory.run(two_pools()[-1], "8192/64", 2.0, slo)
    assert whole.itl.largest > 5 * apart.itl.p99
    assert whole.requests == apart.requests > 30


def test_a_tighter_limit_never_raises_the_rate() -> None:
    laboratory = Laboratory(30)
    loose, tight = (laboratory.rate(one_pool(8192), "1024/64", SloLimits(ttft_s=limit), 16.0) for limit in (5.0, 0.05))
    assert 0 <= tight < loose <= 16


def test_the_table_shows_what_cannot_be_measured() -> None:
    line = Claim("words", "setup", math.nan, math.inf, 1234.0, "ms", "verdict", "hardware")
    made = table([line])
    assert [next(iter(column.cells)) for column in made.columns] == [
        "words", "setup", "-", "overloaded", "1,234 ms", "verdict", "hardware",
    ]  # fmt: skip
