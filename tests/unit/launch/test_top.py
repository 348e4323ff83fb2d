from __future__ import annotations

import io

from rich.console import Console

from twostroke.launch.top import Rates, screen
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1.inference_pb2 import Timeline
from twostroke.v1.worker_pb2 import GetInfoResponse, WatchLoadResponse


def view(written: int, read: int) -> pb.WatchResponse:
    load = WatchLoadResponse(generated_tokens=written, computed_prompt_tokens=read)
    worker = pb.WorkerView(
        address="127.0.0.1:1", state=pb.WORKER_STATE_READY, info=GetInfoResponse(worker_id="decode-0"), load=load
    )
    return pb.WatchResponse(router_id="router-1", ready=True, requests=2, workers=[worker])


DONE = pb.RequestView(
    request_id="chatcmpl-1",
    state=pb.REQUEST_STATE_FINISHED,
    age_ms=5000,
    prompt_tokens=40,
    completion_tokens=9,
    timeline=Timeline(
        prefill_worker_id="prefill-0",
        decode_worker_id="decode-0",
        placed_ms=100,
        prefill_started_ms=500,
        prefill_finished_ms=1000,
        first_token_ms=1000,
        decode_started_ms=1500,
        finished_ms=2000,
        attempts=2,
    ),
    failed_attempts=[pb.FailedAttempt(failed_ms=90, reason="lost")],
)
RUNNING = pb.RequestView(request_id="chatcmpl-2", state=pb.REQUEST_STATE_RUNNING, age_ms=4000, prompt_tokens=3)


def test_rates_are_growth_over_time() -> None:
    rates = Rates()
    assert rates.of(view(100, 1000), 1.0) == (0.0, 0.0)
    assert rates.of(view(150, 1400), 3.0) == (25.0, 200.0)
    assert rates.of(view(10, 20), 4.0) == (0.0, 0.0)
    assert rates.of(view(20, 20), 5.0) == (10.0, 0.0)


def test_every_request_has_its_strokes() -> None:
    output = io.StringIO()
    Console(file=output, width=200).print(screen(view(1, 1), [RUNNING, DONE], (12.0, 34.0), 118))
    lines = output.getvalue().splitlines()
    assert lines[3].split() == ["decode-0", "?", "ready", "0", "0", "0"]
    assert lines[0] == "router-1 ready  2 in flight  12 tokens/s  34 prompt tokens/s"
    running, done = lines[-2:]
    assert running.split()[:5] == ["chatcmpl-2", "running", "3", "0", "4000"]
    assert running.count("█") == 40
    assert done.split()[:8] == ["chatcmpl-1", "finished", "40", "9", "1000", "ms", "2000", "ms"]
    assert done.count("█") == 20
    assert done.endswith("placed 2 times")
