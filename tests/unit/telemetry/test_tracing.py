"""The tracer, without a receiver."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from twostroke.telemetry import spans
from twostroke.telemetry.otlp import OtlpTracer
from twostroke.telemetry.tracing import Clock, open_tracer, trace_id_of

PARENT = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=x"}


class Wall:
    """A clock on the wall that can be put."""

    now_ns = 1_000_000_000_000
    monotonic_ns = 5_000_000_000

    def clock(self) -> Clock:
        return Clock(lambda: self.now_ns, lambda: self.monotonic_ns)

    def go_on(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)
        self.monotonic_ns += int(seconds * 1e9)


@pytest.fixture
def wall() -> Wall:
    return Wall()


@pytest.fixture
def written() -> list[object]:
    return []


@pytest.fixture
def tracer(wall: Wall, written: list[object], monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpTracer]:
    made = OtlpTracer("http://127.0.0.1:9", 1.0, "test", "test-0", wall.clock())
    monkeypatch.setattr(made._processor, "on_end", written.append)
    yield made
    made.close()


def test_a_clock_that_is_put_moves_spans_and_stretches_none(
    tracer: OtlpTracer, wall: Wall, written: list[object]
) -> None:
    """O-98."""
    edge = tracer.begin(spans.REQUEST, 5.0, {})
    assert edge is not None
    wall.go_on(2.0)
    wall.now_ns += 2_000_000_000
    tracer.record(spans.DECODE_RUN, 6.0, 7.0, edge.headers, {})
    edge.end("chat m", 7.0, {})
    run, request = written
    assert (request.end_time - request.start_time) / 1e9 == pytest.approx(2.0)  # type: ignore[attr-defined]
    assert (run.end_time - run.start_time) / 1e9 == pytest.approx(1.0)  # type: ignore[attr-defined]
    assert request.start_time == 1_000_000_000_000  # type: ignore[attr-defined]


def test_children_keep_the_trace_and_its_state(tracer: OtlpTracer, written: list[object]) -> None:
    edge = tracer.begin(spans.REQUEST, 5.0, PARENT)
    assert edge is not None
    assert trace_id_of(edge.headers) == "a" * 32
    assert edge.headers["tracestate"] == "vendor=x"
    assert edge.headers["traceparent"].endswith("-01")
    assert edge.headers["traceparent"] != PARENT["traceparent"]


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, {"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"}])
def test_no_span_without_a_sampled_parent(tracer: OtlpTracer, written: list[object], headers: dict[str, str]) -> None:
    assert tracer.record(spans.PLACE, 1.0, 2.0, headers, {}) is None
    assert written == []


def test_the_ratio_rules_only_traces_that_begin_here(wall: Wall) -> None:
    tracer = OtlpTracer("http://127.0.0.1:9", 0.0, "test", "test-0", wall.clock())
    try:
        assert tracer.begin(spans.REQUEST, 5.0, {}) is None
        assert tracer.begin(spans.REQUEST, 5.0, PARENT) is not None
    finally:
        tracer.close()


def test_no_url_is_no_tracer() -> None:
    assert open_tracer("", 1.0, "test", "test-0") is None


def test_opentelemetry_is_imported_only_when_tracing_is_on() -> None:
    script = (
        "import sys, asyncio\n"
        "from twostroke.config import RouterSettings\n"
        "from twostroke.router.assembly import Router\n"
        "from twostroke.worker import assembly, __main__\n"
        "async def main(): Router(RouterSettings(front_end='plain'))\n"
        "asyncio.run(main())\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
