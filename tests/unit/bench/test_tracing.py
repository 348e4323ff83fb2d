"""What the comparison of tracing on and off makes of its measurements."""

import asyncio
import contextlib

import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SpanExportResult

from twostroke.bench import trace_sink, tracing
from twostroke.bench.record import Record
from twostroke.config import RpcSettings
from twostroke.free_port import free_port
from twostroke.rpc.channel import connect


@pytest.mark.parametrize(("on_us", "ok"), [((101.0, 90.0, 101.9), True), ((103.0, 102.5, 90.0), False)])
def test_the_median_of_the_pairs_is_held_against_the_goal(on_us: tuple[float, ...], ok: bool) -> None:
    record = Record("tracing", "command")
    tracing._record(record, [tracing._Round(100.0, each) for each in on_us], 64.0)
    check, alone = record.checks
    assert check.value == pytest.approx(sorted(on_us)[1] - 100.0)
    assert check.ok is ok
    assert [row.get("router_us") for row in record.rows] == [100.0, sorted(on_us)[1], None]
    assert alone.value == pytest.approx(1.0)
    assert alone.ok


def test_spans_that_cost_too_much_alone_are_not_ok() -> None:
    record = Record("tracing", "command")
    tracing._record(record, [tracing._Round(100.0, 100.0)], 128.1)
    assert [check.ok for check in record.checks] == [True, False]


async def test_the_sink_takes_what_an_exporter_sends() -> None:
    port = free_port("127.0.0.1")
    serving = asyncio.create_task(trace_sink.serve(port))
    async with connect(f"127.0.0.1:{port}", RpcSettings()) as channel:
        await asyncio.wait_for(channel.channel_ready(), 10)
        exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{port}", insecure=True, timeout=5)
        assert await asyncio.to_thread(exporter.export, ()) is SpanExportResult.SUCCESS
        await asyncio.to_thread(exporter.shutdown)
    assert await asyncio.to_thread(tracing._spans_us, f"127.0.0.1:{port}") > 0
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
