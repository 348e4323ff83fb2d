"""A link is tried before it takes traffic."""

from collections.abc import Callable

import numpy as np
import pytest

from twostroke.errors import KvCorruptError, TwostrokeError, WorkerLostError
from twostroke.kv.link import LinkReport
from twostroke.kv.probe import PROBE_BYTES, SMALL_BYTES, Probe, pattern
from twostroke.kv.transport import Rows
from twostroke.v1.kv_pb2 import KvMemory
from unit.kv.kv_fakes import Read, copy

NAME = "p/1/0"


class Trial:
    """A probe of memory that may differ from the pattern."""

    def __init__(self, *, lanes: tuple[str, ...] = ("cma/memory", "tcp/lo")) -> None:
        self.content = pattern(NAME).copy()
        self.target = np.full(PROBE_BYTES, 9, np.uint8)
        self.now_s = 50.0
        self.connected = True
        self.reads: list[Read] = []
        self.ended: list[LinkReport | TwostrokeError] = []
        self.probe = Probe(
            NAME,
            KvMemory(probe_address=self.content.ctypes.data, probe_bytes=PROBE_BYTES),
            self.target,
            self._fetch,
            lambda: self.now_s,
            lambda: lanes,
            self.ended.append,
            timeout_s=4.0,
        )

    def _fetch(self, source: str, rows: Rows, deadline_s: float, over: Callable[[str | None], None]) -> bool:
        if self.connected:
            self.reads.append(Read(source, rows, deadline_s, over))
        return self.connected

    def step(self, seconds: float) -> int:
        """One read arrives, so late; its bytes."""
        read = self.reads.pop(0)
        assert (read.source, read.deadline_s) == (NAME, 4.0)
        self.now_s += seconds
        copy(read.rows)
        read.over(None)
        return int(read.rows[:, 2].sum())


@pytest.fixture
def trial() -> Trial:
    return Trial()


def test_a_good_link_is_measured_without_its_first_read(trial: Trial) -> None:
    trial.probe.run()
    assert [trial.step(3.0), trial.step(0.002), trial.step(0.5)] == [SMALL_BYTES, SMALL_BYTES, PROBE_BYTES]
    (report,) = trial.ended
    assert isinstance(report, LinkReport)
    assert report.lanes == ("cma/memory", "tcp/lo")
    assert not report.rdma
    assert report.bytes_per_s == pytest.approx(2 * PROBE_BYTES)
    assert report.latency_ms == pytest.approx(2.0)


def test_rdma_is_claimed_where_a_lane_is(trial: Trial) -> None:
    trial = Trial(lanes=("rc_mlx5/mlx5_0:1",))
    trial.probe.run()
    for _ in range(3):
        trial.step(0.1)
    assert isinstance(trial.ended[0], LinkReport)
    assert trial.ended[0].rdma


@pytest.mark.parametrize("at", [0, SMALL_BYTES + 1, PROBE_BYTES - 1])
def test_wrong_bytes_are_refused(trial: Trial, at: int) -> None:
    """O-77: a link that brings other bytes than the source has takes no traffic."""
    trial.content[at] ^= 0x10
    trial.probe.run()
    for _ in range(3):
        trial.step(0.1)
    (error,) = trial.ended
    assert isinstance(error, KvCorruptError)
    assert NAME in error.message
    assert "UCX_TLS" in error.message


def test_the_memory_of_another_rank_is_not_taken_for_this_one() -> None:
    """O-79: the pattern is the name's, and a name is one start's."""
    assert not np.array_equal(pattern("p/1/0"), pattern("p/2/0"))
    trial = Trial()
    trial.content[:] = pattern("p/2/0")
    trial.probe.run()
    for _ in range(3):
        trial.step(0.1)
    assert isinstance(trial.ended[0], KvCorruptError)


def test_what_a_former_probe_brought_does_not_pass_for_this_one(trial: Trial) -> None:
    trial.target[:] = pattern(NAME)
    trial.probe.run()
    assert not trial.target.any()


def test_a_refused_read_is_an_error(trial: Trial) -> None:
    trial.probe.run()
    trial.reads.pop().over("outside registered memory")
    (error,) = trial.ended
    assert isinstance(error, WorkerLostError)
    assert "outside registered memory" in error.message


def test_a_source_that_is_not_connected_is_an_error(trial: Trial) -> None:
    trial.connected = False
    trial.probe.run()
    (error,) = trial.ended
    assert isinstance(error, WorkerLostError)


def test_it_ends_once(trial: Trial) -> None:
    trial.probe.run()
    trial.probe.fail(WorkerLostError("the link broke"))
    trial.step(0.1)
    trial.probe.fail(WorkerLostError("again"))
    assert [str(error) for error in trial.ended] == ["the link broke"]
    assert trial.reads == []
