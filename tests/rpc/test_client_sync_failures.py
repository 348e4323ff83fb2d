"""The blocking client against real servers: retries, deadlines and errors."""

import time

import pytest

from rpc.fake_inference import FAST, HELLO, LAST, Answering, FakeInference, gone, piece, serving_in_thread
from twostroke.client import (
    Chunk,
    Client,
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
def routers():
    first, second = FakeInference("first"), FakeInference("second")
    with serving_in_thread(first, second):
        yield first, second


@pytest.fixture
def client(routers):
    with Client([router.target for router in routers], retries=FAST) as client:
        yield client


def test_models_are_asked_for_at_the_next_router_too(client, routers):
    routers[0].script = [gone()]
    for _ in range(2):
        assert client.list_models() == (Model("second", 4096),)
    assert [len(router.received) for router in routers] == [1, 2]


def test_a_retry_goes_to_the_next_router_with_the_same_request_id(client, routers):
    routers[0].script = [gone()]
    stream = client.generate("p")
    assert list(stream) == HELLO
    ids = [[received.request.request_id for received in router.received] for router in routers]
    assert ids == [[stream.request_id], [stream.request_id]]
    client.complete("p")
    assert [len(router.received) for router in routers] == [1, 2]


def test_a_router_that_is_not_there_is_passed_over(routers):
    with serving_in_thread(dead := FakeInference("dead")):
        pass
    with Client([dead.target, routers[1].target], retries=FAST) as client:
        assert client.list_models() == (Model("second", 4096),)
    with Client([dead.target, routers[1].target], retries=FAST) as client:
        assert client.complete("p").text == "Hello"


def test_overload_with_retry_info_is_waited_for(client, routers):
    routers[0].script = [Answering(error=OverloadedError("full", retry_after_s=0.05))]
    begin = time.monotonic()
    assert client.complete("p").text == "Hello"
    assert time.monotonic() - begin >= 0.05
    assert len(routers[1].received) == 1


def test_attempts_are_bounded(client, routers):
    routers[0].script = routers[1].script = [gone()]
    with pytest.raises(UnavailableError, match="draining") as caught:
        client.complete("p", request_id="r-1")
    assert [len(router.received) for router in routers] == [2, 2]
    assert caught.value.__notes__[0] == f"request_id r-1, router {routers[1].target}, attempt 4 of at most 4"
    assert len(caught.value.__notes__) == 4


def test_nothing_is_tried_again_after_the_first_chunk(client, routers):
    routers[0].script = [Answering([piece("a", 1)], WorkerLostError("worker d-1 went away"))]
    stream = client.generate("p")
    assert next(stream) == Chunk("a", (1,))
    with pytest.raises(WorkerLostError, match="worker d-1 went away"):
        next(stream)
    assert (len(routers[0].received), len(routers[1].received)) == (1, 0)
    with pytest.raises(InvalidRequestError, match="it failed with WorkerLostError"):
        next(stream)


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
def test_errors_keep_their_class(client, routers, error):
    routers[0].script = [Answering(error=error)]
    with pytest.raises(TwostrokeError) as caught:
        client.complete("p", request_id="r-1", timeout_s=30)
    assert type(caught.value) is type(error)
    assert caught.value.message == error.message
    assert caught.value.retry_after_s == error.retry_after_s
    assert caught.value.__notes__ == [f"request_id r-1, router {routers[0].target}, attempt 1 of at most 4"]


def test_the_deadline_spans_all_attempts(client, routers):
    routers[0].script = [gone(retry_after_s=0.2)]
    routers[1].script = [Answering(hang=True)]
    begin = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        client.complete("p", timeout_s=1.5)
    assert 1.4 < time.monotonic() - begin < 10
    assert routers[1].received[0].remaining_s < 1.32
    assert caught.value.__notes__[0].endswith("attempt 2 of at most 4")


def test_an_answer_without_an_end_is_an_error(client, routers):
    routers[0].script = [Answering([piece("a", 1)])]
    with pytest.raises(TwostrokeError, match="without saying why the answer ended"):
        client.complete("p")


def test_an_error_after_the_end_is_nobodys(client, routers):
    routers[0].script = [Answering([piece("a", 1), LAST], EngineError("too late"))]
    assert client.complete("p").text == "a"
