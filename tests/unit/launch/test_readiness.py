from __future__ import annotations

import io

import pytest
from rich.console import Console

from twostroke.launch.board import Board
from twostroke.launch.readiness import Readiness
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1.worker_pb2 import GetInfoResponse, StartPhase

P, D = "127.0.0.1:1", "127.0.0.1:2"


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def output() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def readiness(clock: Clock, output: io.StringIO) -> Readiness:
    board = Board(Console(file=output, width=80), ["router", "prefill-0", "decode-0"], clock)
    return Readiness(board, {P: "prefill-0", D: "decode-0"})


def worker(address: str, state: pb.WorkerState, detail: str = "", *phases: StartPhase) -> pb.WorkerView:
    return pb.WorkerView(address=address, state=state, detail=detail, info=GetInfoResponse(start_phases=phases))


def report(*workers: pb.WorkerView, waiting_for: str = "", refused: str = "") -> pb.WatchResponse:
    pairs = [pb.RefusedPair(prefill_worker_id="p", decode_worker_id="d", reason=refused)] if refused else []
    return pb.WatchResponse(
        ready=not waiting_for, waiting_for=waiting_for, workers=workers, refused_pairs=pairs, router_id="r"
    )


def test_nothing_is_ready_before_the_first_report(readiness: Readiness) -> None:
    assert not readiness.complete
    assert readiness.missing() == "router: starting; prefill-0: starting; decode-0: starting"


def test_every_started_worker_must_be_ready(readiness: Readiness) -> None:
    # The router may already serve with the first of two decode workers.
    readiness.see(report(worker(P, pb.WORKER_STATE_READY), worker(D, pb.WORKER_STATE_STARTING, "loading weights")))
    assert not readiness.complete
    assert readiness.missing() == "decode-0: starting: loading weights"
    readiness.see(report(worker(P, pb.WORKER_STATE_READY), worker(D, pb.WORKER_STATE_READY)))
    assert readiness.complete


def test_a_router_that_is_not_ready_says_what_it_waits_for(readiness: Readiness) -> None:
    workers = (worker(P, pb.WORKER_STATE_READY), worker(D, pb.WORKER_STATE_UNREACHABLE, "connection refused"))
    readiness.see(report(*workers, waiting_for="a decode worker (127.0.0.1:2 is unreachable)"))
    assert readiness.missing() == "router: waits for a decode worker; decode-0: starting"


def test_a_refused_pair_is_named(readiness: Readiness) -> None:
    readiness.see(report(waiting_for="a pair", refused="dtype float32 against bfloat16"))
    assert "router: waits for p and d cannot exchange KV: dtype float32 against bfloat16" in readiness.missing()


def test_a_worker_that_gets_lost_is_missing_again(readiness: Readiness) -> None:
    ready = (worker(P, pb.WORKER_STATE_READY), worker(D, pb.WORKER_STATE_READY))
    readiness.see(report(*ready))
    readiness.see(report(ready[0], worker(D, pb.WORKER_STATE_UNREACHABLE, "connection refused")))
    assert readiness.missing() == "decode-0: unreachable: connection refused"


def test_unknown_workers_are_ignored(readiness: Readiness) -> None:
    readiness.see(report(worker("127.0.0.1:9", pb.WORKER_STATE_STARTING), waiting_for="workers"))
    assert "127.0.0.1:9" not in readiness.missing()


def test_the_summary_says_where_the_time_went(readiness: Readiness, clock: Clock) -> None:
    clock.now_s = 103.0
    readiness.see(report(waiting_for="workers"))
    clock.now_s = 107.5
    phases = (StartPhase(name="import", duration_ms=2500.0), StartPhase(name="weights", duration_ms=400.0))
    readiness.see(report(worker(P, pb.WORKER_STATE_READY, "", *phases), waiting_for="a decode worker"))
    clock.now_s = 109.0
    readiness.see(report(worker(P, pb.WORKER_STATE_READY, "", *phases), worker(D, pb.WORKER_STATE_READY)))
    assert readiness.summary() == [
        "Ready after 9.0 s:",
        "  router         9.0 s  answered after 3.0",
        "  prefill-0      7.5 s  import 2.5, weights 0.4",
        "  decode-0       9.0 s",
    ]


def test_changes_are_lines_where_there_is_no_terminal(readiness: Readiness, clock: Clock, output: io.StringIO) -> None:
    clock.now_s = 101.5
    for _ in range(3):
        readiness.see(report(worker(P, pb.WORKER_STATE_READY), worker(D, pb.WORKER_STATE_STARTING, "[x] loading")))
    assert output.getvalue().splitlines() == [
        "[   0.0 s] router: starting",
        "[   0.0 s] prefill-0: starting",
        "[   0.0 s] decode-0: starting",
        "[   1.5 s] prefill-0: ready",
        "[   1.5 s] decode-0: starting: [x] loading",
        "[   1.5 s] router: ready",
    ]
