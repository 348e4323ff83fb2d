import pytest

from twostroke.errors import NoWorkerError
from twostroke.policy.placement import ClusterSnapshot, PlacementRequest, Plan, WorkerSnapshot, place


def reader(worker: str, pending: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(worker, True, False, pending_prompt_tokens=pending, free_blocks=100, block_size_tokens=16)


def writer(worker: str, running: int = 0, free: int = 100) -> WorkerSnapshot:
    return WorkerSnapshot(worker, False, True, running_sequences=running, free_blocks=free, block_size_tokens=16)


def both(worker: str, pending: int = 0, running: int = 0) -> WorkerSnapshot:
    return WorkerSnapshot(worker, True, True, pending, running, free_blocks=100, block_size_tokens=16)


SHORT = PlacementRequest(prompt_tokens=10)

CASES = {
    "the only pair": (SHORT, [reader("p"), writer("d")], Plan("p", "d")),
    "fewest prompt tokens ahead": (SHORT, [reader("p1", 500), reader("p2", 20), writer("d")], Plan("p2", "d")),
    "fewest answers": (SHORT, [reader("p"), writer("d1", 3), writer("d2", 1)], Plan("p", "d2")),
    "most room among equals": (SHORT, [reader("p"), writer("d1", free=5), writer("d2", free=50)], Plan("p", "d2")),
    "room before load": (
        PlacementRequest(prompt_tokens=160),
        [reader("p"), writer("d1", 0, free=10), writer("d2", 9, free=11)],
        Plan("p", "d2"),
    ),
    "no hop for the only worker": (SHORT, [both("w")], Plan(None, "w")),
    "two workers rather than one": (SHORT, [both("w1"), both("w2")], Plan("w1", "w2")),
    "not where it failed": (
        PlacementRequest(10, frozenset({"d1"})),
        [reader("p"), writer("d1"), writer("d2", 9)],
        Plan("p", "d2"),
    ),
    "where it failed rather than nowhere": (
        PlacementRequest(10, frozenset({"d1"})),
        [reader("p"), writer("d1")],
        Plan("p", "d1"),
    ),
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_place(case: str) -> None:
    request, workers, plan = CASES[case]
    assert place(request, ClusterSnapshot(workers)) == plan
    assert place(request, ClusterSnapshot(workers[::-1])) == plan, "the order of the snapshot must not matter"


def test_a_refused_pair_is_never_placed() -> None:
    workers = [reader("p1"), reader("p2", 900), writer("d")]
    assert place(SHORT, ClusterSnapshot(workers, frozenset({("p1", "d")}))) == Plan("p2", "d")
    with pytest.raises(NoWorkerError):
        place(SHORT, ClusterSnapshot(workers, frozenset({("p1", "d"), ("p2", "d")})))


@pytest.mark.parametrize("workers", [[], [reader("p")], [writer("d")]], ids=["none", "no decode", "no prefill"])
def test_no_pair_is_an_error(workers: list[WorkerSnapshot]) -> None:
    with pytest.raises(NoWorkerError):
        place(SHORT, ClusterSnapshot(workers))
