"""What our vLLM scheduler tells, as it comes out of vLLM's own encoding."""

from types import SimpleNamespace

import msgspec
import pytest

from twostroke.engine.base import StepSample
from twostroke.engine.vllm.report import REPORT, Report, change_row, sample_row, take_report, to_change, to_sample
from twostroke.policy.kv_events import Change, Cleared, Removed, Stored
from twostroke.policy.step_model import StepBatch

BIG = (1 << 64) - 3


def sent(value: object) -> object:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


@pytest.mark.parametrize("change", [Stored([1, BIG], 7), Stored([5], None), Removed([BIG, 2]), Cleared()], ids=str)
def test_changes_of_blocks_arrive_as_they_were(change: Change) -> None:
    assert to_change(sent(change_row(change))) == change


def test_hashes_are_cut_to_what_the_index_keeps() -> None:
    full = b"\x01" * 24 + b"\xff" * 8
    assert to_change(sent(change_row(Stored([full], full)))) == Stored([(1 << 64) - 1], (1 << 64) - 1)


def test_samples_arrive_as_they_were() -> None:
    sample = StepSample(StepBatch(3, 1200, 512, 130816.0, 2), 0.125, 0.05)
    assert to_sample(sent(sample_row(sample))) == sample


def test_the_report_is_taken_out_of_the_connectors_own_numbers() -> None:
    report = Report(steps=[[1.0]], progress={"a": 5}, blocks=[["cleared"]])
    stats = SimpleNamespace(kv_connector_stats=sent({"held_handoffs": 2, REPORT: report}))
    assert take_report(stats) == report
    assert stats.kv_connector_stats == {"held_handoffs": 2}
    for without in (None, SimpleNamespace(kv_connector_stats=None), stats):
        assert take_report(without) == Report(steps=[], progress={}, blocks=[])
