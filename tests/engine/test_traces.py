"""Traces of a worker with the real engine, whose processes are forked before the exporter is made."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from cluster.reference_cluster import free_ports
from telemetry.traces import receiver
from twostroke.config import RpcSettings, WorkerSettings, load
from twostroke.rpc.channel import connect
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from twostroke.v1.prefill_pb2 import PrefillRequest
from twostroke.v1.prefill_pb2_grpc import PrefillServiceStub
from twostroke.v1.worker_pb2 import GetInfoRequest
from twostroke.v1.worker_pb2_grpc import WorkerServiceStub

TRACE, CALLER = "5" * 32, "00f067aa0ba902b7"
START_S = 200.0

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


def test_vllm_is_told_where_traces_go(model: str) -> None:
    from twostroke.engine.vllm.launch import engine_args

    told = engine_args(load(WorkerSettings, model=model, otlp_endpoint="collector:4317"), {})
    assert told.otlp_traces_endpoint == "http://collector:4317"
    assert engine_args(load(WorkerSettings, model=model), {}).otlp_traces_endpoint is None


@asynccontextmanager
async def worker(model: str, *flags: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], grpc.aio.Channel]]:
    port = free_ports(1)[0]
    common = ("--model", model, "--port", str(port), "--kv-bytes", str(64 << 20), "--max-model-len-tokens", "512")
    process = subprocess.Popen([sys.executable, "-m", "twostroke.worker", *common, *flags], env={**os.environ})
    try:
        async with connect(f"127.0.0.1:{port}", RpcSettings()) as channel:
            yield process, channel
    finally:
        process.kill()
        process.wait()


async def test_spans_of_a_worker_whose_engine_was_forked_all_arrive(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-95 and O-96: they go out on shutdown, through an exporter that was made after the forks."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with receiver(tmp_path) as found:
        async with worker(model, "--otlp-endpoint", found.address, "--metrics-port", "0") as (process, channel):
            stub = WorkerServiceStub(channel)
            info = await stub.GetInfo(GetInfoRequest(), timeout=START_S, wait_for_ready=True)
            for number in range(5):
                wanted = EngineRequest(
                    request_id=f"r-{number}",
                    prompt_token_ids=range(100, 140 + number),
                    sampling=SamplingParams(temperature=0, max_tokens=1),
                )
                wanted.trace_context["traceparent"] = f"00-{TRACE}-{CALLER}-01"
                asked = PrefillRequest(request=wanted, worker_epoch=info.epoch)
                events = [
                    each.WhichOneof("event") async for each in PrefillServiceStub(channel).Prefill(asked, timeout=60)
                ]
                assert events[-1] == "finished"
            assert found.spans() == []
            process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.wait, 30) == 0
        spans = found.spans()
    assert sorted(span.name for span in spans) == ["prefill.queue"] * 5 + ["prefill.run"] * 5
    assert {(span.trace, span.parent) for span in spans} == {(TRACE, CALLER)}
    assert sorted(s.attributes["gen_ai.usage.input_tokens"] for s in spans if s.name == "prefill.run") == [
        *range(40, 45)
    ]
