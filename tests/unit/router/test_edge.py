"""The edge's span, and the middleware that makes one of each HTTP request."""

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.router.access import Access
from twostroke.router.edge import Edge
from twostroke.router.output import Trail
from twostroke.router.vllm.trace_edge import REJECTED, TraceEdge
from twostroke.telemetry.spans import SpanType
from twostroke.telemetry.tracing import Attributes, Headers

OWN = {"traceparent": f"00-{'a' * 32}-{'c' * 16}-01"}
CALLERS = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}


class Open:
    headers: Headers = OWN

    def __init__(self, tracer: "FakeTracer") -> None:
        self._tracer = tracer

    def end(self, name: str, end_s: float, attributes: Attributes, *, error: str = "") -> None:
        told = {attribute.key: value for attribute, value in attributes.items()}
        self._tracer.ended.append((name, told, error))


class FakeTracer:
    def __init__(self, *, sampled: bool = True) -> None:
        self.parents: list[Headers] = []
        self.ended: list[tuple[str, Mapping[str, Any], str]] = []
        self._sampled = sampled

    def begin(self, span: SpanType, begin_s: float, parent: Headers) -> Open | None:
        self.parents.append(parent)
        return Open(self) if self._sampled else None

    def record(self, *_: Any, **__: Any) -> None:
        raise AssertionError("an edge records nothing else")

    def close(self) -> None: ...


def trail(**more: Any) -> Trail:
    common = {"received_s": 10.0, "first_token_s": 10.5, "attempts": 1, "prompt_tokens": 7, "completion_tokens": 3}
    return Trail(**{**common, "finish": "stop", **more})


def test_choices_are_added_up() -> None:
    tracer = FakeTracer()
    edge = Edge(tracer, "chat", "m", CALLERS)
    edge.trails += [trail(cached_tokens=2), trail(finish="length", first_token_s=10.25, attempts=2)]
    edge.end()
    ((name, told, error),) = tracer.ended
    assert (name, error, tracer.parents) == ("chat m", "", [CALLERS])
    assert told["gen_ai.usage.input_tokens"] == 7
    assert told["gen_ai.usage.output_tokens"] == 6
    assert told["gen_ai.usage.cache_read.input_tokens"] == 2
    assert told["gen_ai.response.finish_reasons"] == ("stop", "length")
    assert told["gen_ai.response.time_to_first_chunk"] == 0.25
    assert told["twostroke.attempts"] == 2


def test_a_choice_that_failed_is_the_error() -> None:
    tracer = FakeTracer()
    edge = Edge(tracer, "chat", "m", None)
    edge.trails += [trail(), trail(finish="", failure="it went away", error_type="WORKER_LOST")]
    edge.end()
    ((_, told, error),) = tracer.ended
    assert (told["error.type"], error) == ("WORKER_LOST", "it went away")
    assert told["gen_ai.response.finish_reasons"] == ("stop", "error")


@pytest.mark.parametrize(
    ("tracer", "told", "trace_id"),
    [
        (FakeTracer(), OWN, "a" * 32),
        (FakeTracer(sampled=False), {}, "a" * 32),
        (None, CALLERS, "a" * 32),
    ],
)
def test_what_workers_are_told(tracer: FakeTracer | None, told: Headers, trace_id: str) -> None:
    """Nothing of a trace that is not sampled; without tracing here, the caller's context as it came."""
    edge = Edge(tracer, "chat", "m", CALLERS)
    assert (edge.headers, edge.trace_id) == (told, trace_id)


def scope(tracer: FakeTracer, path: str, served: object = "m") -> dict[str, Any]:
    llm = SimpleNamespace(
        engine_core=SimpleNamespace(tracer=tracer, access=Access()),
        model_config=SimpleNamespace(served_model_name=served),
    )
    headers = [(b"host", b"x"), (b"traceparent", CALLERS["traceparent"].encode())]
    return {
        "type": "http",
        "path": path,
        "headers": headers,
        "app": SimpleNamespace(state=SimpleNamespace(engine_client=llm)),
    }


async def nothing(*_: Any) -> Any:
    raise AssertionError("no message is touched")


@pytest.mark.parametrize("served", ["m", ["m", "alias"]])
async def test_an_http_request_is_one_edge(served: object) -> None:
    tracer = FakeTracer()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (receive, send) == (nothing, nothing), "passed as they are"
        edge = Edge.current.get()
        assert edge is not None
        edge.trails.append(trail())

    await TraceEdge(app)(scope(tracer, "/v1/chat/completions", served), nothing, nothing)
    ((name, told, error),) = tracer.ended
    assert (name, told["gen_ai.operation.name"], error) == ("chat m", "chat", "")
    assert tracer.parents == [CALLERS]
    assert Edge.current.get() is None


async def test_a_request_that_never_reached_the_cluster_was_rejected() -> None:
    tracer = FakeTracer()

    async def app(*_: Any) -> None: ...

    await TraceEdge(app)(scope(tracer, "/v1/completions"), nothing, nothing)
    assert tracer.ended[0][1]["error.type"] == REJECTED


async def test_an_app_that_breaks_ends_its_edge() -> None:
    tracer = FakeTracer()

    async def app(*_: Any) -> None:
        raise ConnectionError

    with pytest.raises(ConnectionError):
        await TraceEdge(app)(scope(tracer, "/v1/messages"), nothing, nothing)
    assert len(tracer.ended) == 1


async def test_other_routes_have_no_edge() -> None:
    tracer, reached = FakeTracer(), []

    async def app(scope: Any, *_: Any) -> None:
        reached.append((scope["path"], Edge.current.get()))

    await TraceEdge(app)(scope(tracer, "/v1/models"), nothing, nothing)
    await TraceEdge(app)({"type": "lifespan", "path": ""}, nothing, nothing)
    assert reached == [("/v1/models", None), ("", None)]
    assert tracer.parents == []
