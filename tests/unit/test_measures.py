"""The dictionary of measures."""

from pathlib import Path

import numpy as np
import pytest

from twostroke import measures
from twostroke.errors import ConfigError
from twostroke.measures import SloLimits, parse_slo

DOCS = Path(__file__).parents[2] / "docs"


def test_the_document_is_current() -> None:
    assert (DOCS / "metrics.md").read_text() == measures.document(), (
        "run: python -m twostroke.measures > docs/metrics.md"
    )


def test_percentile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    values = np.arange(1.0, 101.0)
    assert [measures.percentile(values, share) for share in (0.5, 0.99, 0.999)] == [50, 99, 100]
    assert np.isnan(measures.percentile(np.array([]), 0.5))
    counts = np.array([90, 9, 1])
    sizes = np.array([0.01, 0.1, 1.0])
    spread = np.repeat(sizes, counts)
    for share in (0.1, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0):
        assert measures.weighted_percentile(sizes, counts, share) == measures.percentile(spread, share)


def test_tpot_leaves_out_the_first_token() -> None:
    found = measures.tpot_s(np.array([1.0, 1.0]), np.array([2.0, 1.0]), np.array([11, 1]))
    assert found[0] == pytest.approx(0.1)
    assert np.isnan(found[1])


def test_stall_share() -> None:
    sizes, counts = np.array([0.01, 0.5]), np.array([150, 3])
    assert measures.stall_share(sizes, counts) == pytest.approx(0.5)
    assert measures.stall_share(sizes, counts, limit_s=0.6) == 0


def test_good_needs_every_limit() -> None:
    slo = SloLimits(ttft_s=1.0, itl_s=0.05, tpot_s=0.02)
    ttft = np.array([0.5, 1.5, 0.5, 0.5, 0.5])
    tpot = np.array([0.01, 0.01, 0.03, 0.01, np.nan])
    over = np.array([2, 0, 0, 3, 0])
    tokens = np.array([201, 201, 201, 201, 1])
    assert measures.good(slo, ttft, tpot, over, tokens).tolist() == [True, False, False, False, True]


def test_slo_texts() -> None:
    assert parse_slo("ttft=2s, itl=40ms") == SloLimits(2.0, 0.04, 0.0)
    assert parse_slo("ttft=2s,itl=40ms").text() == "ttft=2000ms,itl=40ms"
    for bad in ("ttft=2", "speed=2s", "itl=fast ms"):
        with pytest.raises(ConfigError, match="SLO"):
            parse_slo(bad)
