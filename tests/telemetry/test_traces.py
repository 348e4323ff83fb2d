"""Traces of a cluster, as they arrive at an OTLP receiver in another process."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from cluster.reference_cluster import WAIT_S, Cluster, request, running
from telemetry.traces import Receiver, Span, receiver
from twostroke.config import RpcSettings
from twostroke.rpc.channel import connect
from twostroke.telemetry.spans import SPANS
from twostroke.v1.engine_pb2 import EngineRequest, SamplingParams
from twostroke.v1.inference_pb2 import GenerateRequest
from twostroke.v1.inference_pb2_grpc import InferenceServiceStub
from twostroke.v1.prefill_pb2 import PrefillRequest
from twostroke.v1.prefill_pb2_grpc import PrefillServiceStub
from twostroke.v1.worker_pb2 import GetInfoRequest
from twostroke.v1.worker_pb2_grpc import WorkerServiceStub

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
STROKES = {"place", "prefill.queue", "prefill.run", "handoff", "decode.wait", "decode.run"}
SLOW = ("--reference-token-us", "300", "--step-budget-tokens", "64")
FEW_MS = 60.0
"""Between moments that two processes see, on a machine that does other things too."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Receiver]:
    with receiver(tmp_path_factory.mktemp("spans")) as running_receiver:
        yield running_receiver


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(found: Receiver) -> AsyncIterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        flags = ("--otlp-endpoint", found.address)
        async with running(1, 2, worker_flags=(*flags, *SLOW), router_flags=flags) as cluster:
            yield cluster


def traceparent(trace: str, flags: str = "01") -> tuple[tuple[str, str], ...]:
    return (("traceparent", f"00-{trace}-{CALLER}-{flags}"),)


async def ask(cluster: Cluster, wanted: GenerateRequest, metadata: Sequence[tuple[str, str]] = ()) -> None:
    call = InferenceServiceStub(cluster.channel).Generate(wanted, timeout=WAIT_S, metadata=metadata)
    async for _ in call:
        pass


def of(spans: Sequence[Span], trace: str) -> list[Span]:
    return [span for span in spans if span.trace == trace]


def edge_of(spans: Sequence[Span]) -> Span:
    return next(span for span in spans if span.kind == 2)


async def test_one_request_is_one_tree_across_router_prefill_and_decode(cluster: Cluster, found: Receiver) -> None:
    """O-94 and O-97: one trace id, right parents, no orphans; the hand-off is a span of its own."""
    await ask(cluster, request(range(1000), 12), traceparent(TRACE))
    spans = of(await found.until(lambda spans: len(of(spans, TRACE)) >= 7), TRACE)
    edge = edge_of(spans)
    assert (edge.name, edge.parent) == ("text_completion reference", CALLER)
    assert Counter(span.name for span in spans) == Counter([edge.name, *STROKES])
    assert {span.parent for span in spans if span is not edge} == {edge.id}, "siblings under the edge's span"
    assert not any(span.error or span.links for span in spans)
    assert {(span.name, span.resource["service.name"]) for span in spans if span is not edge} == {
        *((name, "twostroke-router") for name in ("place", "handoff")),
        *((name, "twostroke-worker") for name in ("prefill.queue", "prefill.run", "decode.wait", "decode.run")),
    }
    by_name = {span.name: span for span in spans}
    assert by_name["prefill.run"].resource["service.instance.id"] == "prefill-0"
    assert edge.attributes["gen_ai.usage.input_tokens"] == 1000
    assert edge.attributes["gen_ai.usage.output_tokens"] == 12
    assert edge.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert 0 < edge.attributes["gen_ai.response.time_to_first_chunk"] * 1000 < edge.duration_ms
    handoff = by_name["handoff"].attributes
    assert (handoff["twostroke.handoff.blocks"], handoff["twostroke.handoff.tokens"]) == (63, 1000)
    assert handoff["twostroke.handoff.bytes"] == 63 * 512
    assert handoff["twostroke.handoff.chunks"] > 5, "it was read while prefill computed 16 steps"
    assert handoff["twostroke.handoff.lanes"] == ["shm/mmap"]
    assert handoff["twostroke.link.gb_per_s"] > 0
    gb_per_s = handoff["twostroke.handoff.bytes"] / by_name["handoff"].duration_ms / 1e6
    assert handoff["twostroke.handoff.gb_per_s"] == pytest.approx(gb_per_s, rel=0.01)
    assert handoff["twostroke.handoff.exposed_ms"] < by_name["handoff"].duration_ms / 2


async def test_the_spans_follow_each_other_as_the_strokes_do(cluster: Cluster, found: Receiver) -> None:
    trace = "a" * 32
    await ask(cluster, request(range(2000, 3000), 12), traceparent(trace))
    spans = of(await found.until(lambda spans: len(of(spans, trace)) >= 7), trace)
    by_name = {span.name: span for span in spans}
    edge = edge_of(spans)
    slack_ns = FEW_MS * 1e6
    assert all(edge.begin_ns - slack_ns <= span.begin_ns <= span.end_ns <= edge.end_ns + slack_ns for span in spans)
    assert by_name["prefill.queue"].end_ns == pytest.approx(by_name["prefill.run"].begin_ns, abs=1e6)
    assert abs(by_name["decode.wait"].end_ns - by_name["decode.run"].begin_ns) < slack_ns
    assert by_name["handoff"].begin_ns < by_name["prefill.run"].end_ns, "it overlaps with prefill"
    assert by_name["prefill.run"].duration_ms > 1000 * 0.3 - FEW_MS, "300 us a token"
    assert by_name["decode.run"].attributes["twostroke.steps"] >= 10


async def test_every_attribute_is_in_the_catalogue(cluster: Cluster, found: Receiver) -> None:
    await ask(cluster, request(range(100), 3), traceparent("b" * 32))
    spans = await found.until(lambda spans: len(of(spans, "b" * 32)) >= 7)
    known = {kind.name: {attribute.key for attribute in kind.attributes} for kind in SPANS}
    for span in spans:
        allowed = known[SPANS[0].name if span.kind == 2 else span.name]
        assert set(span.attributes) <= allowed, span.name
    host = os.uname().nodename
    assert all(span.resource["host.name"] == host and span.resource["process.pid"] for span in spans), "O-98"


async def test_callers_decide_whether_their_requests_are_traced(cluster: Cluster, found: Receiver) -> None:
    await ask(cluster, request(range(100), 2), traceparent("c" * 32, "00"))
    await ask(cluster, request(range(100), 2), traceparent("d" * 32, "01"))
    spans = await found.until(lambda spans: len(of(spans, "d" * 32)) >= 7)
    assert not of(spans, "c" * 32)


async def test_a_malformed_trace_context_begins_a_trace_of_its_own(cluster: Cluster, found: Receiver) -> None:
    before = {span.trace for span in found.spans()}
    await ask(cluster, request(range(100), 2), (("traceparent", "00-zz-1-01"),))
    spans = await found.until(lambda spans: len([s for s in spans if s.trace not in before and s.kind == 2]) == 1)
    assert edge_of([span for span in spans if span.trace not in before]).parent == ""


async def test_a_refused_request_has_an_edge_span_with_its_error(cluster: Cluster, found: Receiver) -> None:
    trace = "e" * 32
    with pytest.raises(grpc.aio.AioRpcError):
        await ask(cluster, GenerateRequest(text="no tokenizer here"), traceparent(trace))
    spans = of(await found.until(lambda spans: bool(of(spans, trace))), trace)
    assert [span.attributes["error.type"] for span in spans] == ["INVALID_REQUEST"]
    assert "takes token ids" in spans[0].error


async def test_attempts_are_siblings_with_links(cluster: Cluster, found: Receiver) -> None:
    """The worker that writes is killed; what it did not export is gone, what the router knows of it is there."""
    trace = "f" * 32
    asked = asyncio.create_task(ask(cluster, request(range(300), 2000), traceparent(trace)))
    view = await cluster.until(
        lambda view: (
            any(
                each.router_requests and each.load.running_requests and each.info.worker_id.startswith("decode")
                for each in view.workers
            )
            and view.handoffs.received == 1
        )
    )
    victim = next(w.info.worker_id for w in view.workers if w.router_requests and w.info.worker_id != "prefill-0")
    cluster.kill(victim)
    await asked
    spans = of(await found.until(lambda spans: any(s.kind == 2 for s in of(spans, trace))), trace)
    spans = of(await found.until(lambda s: sum(x.name == "decode.run" for x in of(s, trace)) == 1), trace)
    edge = edge_of(spans)
    assert edge.attributes["twostroke.attempts"] == 2
    assert not edge.error
    assert all(span.parent == edge.id for span in spans if span is not edge)
    attempt = next(span for span in spans if span.name == "attempt")
    assert attempt.attributes["error.type"] == "WORKER_LOST"
    assert attempt.attributes["twostroke.decode.worker_id"] == victim
    assert victim in attempt.error
    first, second = sorted((span for span in spans if span.name == "place"), key=lambda span: span.begin_ns)
    assert (first.links, second.links) == ([], [attempt.id])
    assert (first.attributes["twostroke.attempt"], second.attributes["twostroke.attempt"]) == (1, 2)
    assert second.attributes["twostroke.decode.worker_id"] != victim
    runs = [span for span in spans if span.name == "decode.run"]
    assert [run.attributes["twostroke.handoff_id"][-2:] for run in runs] == [".2"]
    cluster.start_worker(victim, "--otlp-endpoint", found.address, *SLOW)
    await cluster.ready(3)


async def test_an_answer_of_one_token_has_no_handoff(cluster: Cluster, found: Receiver) -> None:
    trace = "3" * 32
    await ask(cluster, request(range(50), 1), traceparent(trace))
    spans = of(await found.until(lambda spans: any(s.kind == 2 for s in of(spans, trace))), trace)
    spans = of(await found.until(lambda s: {"prefill.run", "place"} <= {x.name for x in of(s, trace)}), trace)
    assert not {"handoff", "decode.run"} & {span.name for span in spans}


async def test_both_strokes_on_one_worker(found: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    trace, flags = "4" * 32, ("--otlp-endpoint", found.address)
    alone = {"decode-0": ("--role", "both")}
    async with running(0, 1, worker_flags=flags, own_flags=alone, router_flags=flags) as cluster:
        await ask(cluster, request(range(100), 5), traceparent(trace))
        spans = of(await found.until(lambda spans: len(of(spans, trace)) == 5), trace)
    by_name = {span.name: span for span in spans}
    assert set(by_name) == {"text_completion reference", "place", "prefill.queue", "prefill.run", "decode.run"}
    assert by_name["place"].attributes["twostroke.placement.option"] == "d_alone"
    assert by_name["prefill.run"].attributes["twostroke.prompt.computed_tokens"] == 100
    assert by_name["prefill.run"].end_ns <= by_name["decode.run"].end_ns


async def test_a_worker_alone_has_a_real_tracer(cluster: Cluster, found: Receiver) -> None:
    """O-95: no router takes part."""
    trace = "1" * 32
    async with connect(f"127.0.0.1:{cluster.ports['prefill-0']}", RpcSettings()) as channel:
        info = await WorkerServiceStub(channel).GetInfo(GetInfoRequest(), timeout=WAIT_S)
        wanted = EngineRequest(
            request_id="alone", prompt_token_ids=range(50), sampling=SamplingParams(temperature=0, max_tokens=1)
        )
        wanted.trace_context["traceparent"] = f"00-{trace}-{CALLER}-01"
        call = PrefillServiceStub(channel).Prefill(
            PrefillRequest(request=wanted, worker_epoch=info.epoch), timeout=WAIT_S
        )
        events = [response.WhichOneof("event") async for response in call]
    assert events[-1] == "finished"
    spans = of(await found.until(lambda spans: len(of(spans, trace)) == 2), trace)
    assert {(span.name, span.parent) for span in spans} == {("prefill.queue", CALLER), ("prefill.run", CALLER)}


async def test_two_routers_lose_no_span_and_all_are_flushed_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O-96. The exporters would wait for a minute; what is there comes from their shutdown."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "60000")
    with receiver(tmp_path) as late:
        flags = ("--otlp-endpoint", late.address)
        async with running(1, 1, worker_flags=flags, router_flags=flags) as one:
            workers = ",".join(f"127.0.0.1:{one.ports[name]}" for name in ("prefill-0", "decode-0"))
            port = int(one.ports["router"]) + 1
            two = Cluster(tmp_path)
            two.ports["router"] = port
            two.start("router", "--front-end", "plain", "--grpc-port", str(port), "--workers", workers, *flags)
            try:
                await two.ready(2)
                each = [request(range(10 * n, 10 * n + 200), 4) for n in range(20)]
                await asyncio.gather(*(ask(each_of, wanted) for wanted in each[::2] for each_of in (one, two)))
            finally:
                await two.channel.close()
                await asyncio.to_thread(two.stop)
            assert {span.resource["service.name"] for span in late.spans()} == {"twostroke-router"}
        counts = Counter(span.name for span in late.spans())
    assert counts == Counter({"text_completion reference": 20, **dict.fromkeys(STROKES, 20)})


async def test_a_receiver_that_is_not_there_costs_nothing_but_the_spans() -> None:
    flags = ("--otlp-endpoint", "127.0.0.1:9")
    async with running(worker_flags=flags, router_flags=flags) as cluster:
        answer = await cluster.ask(request(range(100), 4))
        assert len(answer.token_ids) == 4


async def test_nothing_is_traced_that_the_ratio_leaves_out(tmp_path: Path) -> None:
    with receiver(tmp_path) as none:
        flags = ("--otlp-endpoint", none.address)
        async with running(worker_flags=flags, router_flags=(*flags, "--trace-ratio", "0")) as cluster:
            await ask(cluster, request(range(100), 2))
            await ask(cluster, request(range(100), 2), traceparent("2" * 32))
        assert {span.trace for span in none.spans()} == {"2" * 32}
        assert len(none.spans()) == 7
