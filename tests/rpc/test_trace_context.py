"""W3C trace context in metadata, from a program that uses OpenTelemetry."""

import pytest
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, use_span

from rpc.fake_inference import FakeInference, serving, serving_in_thread
from twostroke.client import AsyncClient, Client
from twostroke.rpc.trace_context import metadata, present

SPAN = NonRecordingSpan(SpanContext(int("a" * 32, 16), int("b" * 16, 16), False, TraceFlags(1)))
TRACEPARENT = f"00-{'a' * 32}-{'b' * 16}-01"


def test_without_a_span_there_is_nothing_to_tell() -> None:
    assert present() == ()


def test_the_present_span_is_told() -> None:
    with use_span(SPAN):
        assert present() == (("traceparent", TRACEPARENT),)


def test_headers_as_metadata() -> None:
    assert metadata({"traceparent": "x", "tracestate": "y"}) == (("traceparent", "x"), ("tracestate", "y"))


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_clients_pass_the_context_of_their_program_on(kind: str) -> None:
    router = FakeInference("router")
    with use_span(SPAN):
        if kind == "async":
            async with serving(router), AsyncClient(router.target) as client:
                await client.complete("p")
        else:
            with serving_in_thread(router), Client(router.target) as client:
                client.complete("p")
    assert [received.metadata["traceparent"] for received in router.received] == [TRACEPARENT]
