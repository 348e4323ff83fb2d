"""The asynchronous client against real servers: retries, deadlines and errors."""

import math
import time

import pytest

from rpc.fake_inference import FAST, HELLO, LAST, Answering, FakeInference, gone, hanging, piece, serving
from twostroke.client import (
    AsyncClient,
    Chunk,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    Model,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    TwostrokeError,
    UnavailableError,
    UnknownModelError,
    WorkerLostError,
)


@pytest.fixture
async def routers():
    first, second = FakeInference("first"), FakeInference("second")
    async with serving(first, second):
        yield first, second


@pytest.fixture
async def client(routers):
    async with AsyncClient([router.target for router in routers], retries=FAST) as client:
        yield client


async def test_a_retry_goes_to_the_next_router_with_the_same_request_id(client, routers):
    routers[0].script = [gone()]
    stream = client.generate("p")
    assert [chunk async for chunk in stream] == HELLO
    ids = [[received.request.request_id for received in router.received] for router in routers]
    assert ids == [[stream.request_id], [stream.request_id]]
    await client.complete("p")
    assert [len(router.received) for router in routers] == [1, 2]


async def test_a_router_that_is_not_there_is_passed_over(routers):
    async with serving(dead := FakeInference("dead")):
        pass
    async with AsyncClient([dead.target, routers[1].target], retries=FAST) as client:
        assert (await client.complete("p")).text == "Hello"
        assert await client.list_models() == (Model("second", 4096),)


async def test_overload_with_retry_info_is_waited_for(client, routers):
    routers[0].script = [Answering(error=OverloadedError("full", retry_after_s=0.05))]
    begin = time.monotonic()
    assert (await client.complete("p")).text == "Hello"
    assert time.monotonic() - begin >= 0.05
    assert len(routers[1].received) == 1


async def test_models_are_asked_for_at_the_next_router_too(client, routers):
    routers[0].script = [gone()]
    for _ in range(2):
        assert await client.list_models() == (Model("second", 4096),)
    assert [len(router.received) for router in routers] == [1, 2]


async def test_attempts_are_bounded(client, routers):
    routers[0].script = routers[1].script = [gone()]
    with pytest.raises(UnavailableError, match="draining") as caught:
        await client.complete("p", request_id="r-1")
    assert [len(router.received) for router in routers] == [2, 2]
    assert caught.value.__notes__[0] == f"request_id r-1, router {routers[1].target}, attempt 4 of at most 4"
    assert caught.value.__notes__[1] == f"before that: attempt 1, router {routers[0].target}: UNAVAILABLE: draining"


@pytest.mark.parametrize(
    "error", [WorkerLostError("worker d-1 went away"), OverloadedError("cut off", retry_after_s=0.0)]
)
async def test_nothing_is_tried_again_after_the_first_chunk(client, routers, error):
    routers[0].script = [Answering([piece("a", 1)], error)]
    stream = client.generate("p")
    assert await anext(stream) == Chunk("a", (1,))
    with pytest.raises(type(error), match=error.message):
        await anext(stream)
    assert (len(routers[0].received), len(routers[1].received)) == (1, 0)
    assert stream.text == "a"
    with pytest.raises(InvalidRequestError, match=f"it failed with {type(error).__name__}"):
        await anext(stream)


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequestError("top_p must be in (0, 1]"),
        PromptTooLongError("9000 tokens do not fit 4096"),
        UnknownModelError("no model 'x'"),
        OverloadedError("full", retry_after_s=600.0),
        UnavailableError("draining", retry_after_s=600.0),
        NoWorkerError("no worker", retry_after_s=600.0),
        DeadlineError("the queue is too long"),
        EngineError("step failed"),
    ],
)
async def test_errors_keep_their_class(client, routers, error):
    routers[0].script = [Answering(error=error)]
    with pytest.raises(TwostrokeError) as caught:
        await client.complete("p", request_id="r-1", timeout_s=30)
    assert type(caught.value) is type(error)
    assert caught.value.message == error.message
    assert caught.value.retry_after_s == error.retry_after_s
    assert caught.value.__notes__ == [f"request_id r-1, router {routers[0].target}, attempt 1 of at most 4"]


async def test_the_deadline_is_the_calls_own_or_else_the_clients(routers):
    async with AsyncClient(routers[0].target, timeout_s=50) as client:
        await client.complete("p")
        await client.complete("p", timeout_s=20)
        await client.complete("p", timeout_s=math.inf)
        await client.list_models()
        await client.list_models(timeout_s=20)
    default, own, none, models, own_models = (received.remaining_s for received in routers[0].received)
    # gRPC rounds what is left up to a few digits.
    assert 25 < default < 51
    assert 0 < own < 21
    assert none is None
    assert 25 < models < 51
    assert 0 < own_models < 21


async def test_the_deadline_spans_all_attempts(client, routers):
    routers[0].script = [gone(retry_after_s=0.2)]
    routers[1].script = [Answering(hang=True)]
    begin = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        await client.complete("p", timeout_s=1.5)
    assert 1.4 < time.monotonic() - begin < 10
    assert routers[1].received[0].remaining_s < 1.32
    assert caught.value.__notes__[0].endswith("attempt 2 of at most 4")


async def test_the_deadline_ends_a_stream_that_has_begun(client, routers):
    routers[0].script = [hanging()]
    stream = client.generate("p", timeout_s=1.5)
    with pytest.raises(DeadlineError):
        _ = [chunk async for chunk in stream]
    assert (stream.text, len(routers[1].received)) == ("a", 0)


async def test_an_answer_without_an_end_is_an_error(client, routers):
    routers[0].script = [Answering([piece("a", 1)])]
    with pytest.raises(TwostrokeError, match="without saying why the answer ended"):
        await client.complete("p")


async def test_an_error_after_the_end_is_nobodys(client, routers):
    routers[0].script = [Answering([piece("a", 1), LAST], EngineError("too late"))]
    assert (await client.complete("p")).text == "a"


async def test_another_service_on_the_port_is_an_error_of_ours(routers):
    class Nothing(FakeInference):
        Generate = None

    async with serving(wrong := Nothing("wrong")), AsyncClient(wrong.target) as client:
        with pytest.raises(TwostrokeError):
            await client.complete("p")
