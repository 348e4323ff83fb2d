import pytest

from twostroke.bench.record import Record
from twostroke.bench.start import Started, _record_reference, complete
from twostroke.v1.cluster_pb2 import WORKER_STATE_READY, WORKER_STATE_STARTING, WatchResponse, WorkerView


def view(ready: bool, *states: int) -> WatchResponse:
    return WatchResponse(ready=ready, workers=[WorkerView(state=state) for state in states])  # type: ignore[arg-type]


def test_a_cluster_has_started_when_the_router_and_all_workers_say_so() -> None:
    assert complete(view(True, WORKER_STATE_READY, WORKER_STATE_READY), 2)
    assert not complete(view(True, WORKER_STATE_READY, WORKER_STATE_STARTING), 2)
    assert not complete(view(False, WORKER_STATE_READY, WORKER_STATE_READY), 2)
    assert not complete(view(True, WORKER_STATE_READY), 2)


@pytest.mark.parametrize(("seconds", "ok"), [((2.0, 2.9, 9.0), True), ((2.0, 3.1, 3.2), False)])
def test_the_median_start_is_held_against_three_seconds(seconds: tuple[float, ...], ok: bool) -> None:
    record = Record("start", "command")
    _record_reference(record, [Started(ready_s, ready_s + 1) for ready_s in seconds])
    (check,) = record.checks
    assert check.value == seconds[1]
    assert check.ok is ok
    assert check.goal == "< 3 s"
    assert "1 router + 2 prefill + 2 decode" in check.name
