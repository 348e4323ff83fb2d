"""The blocking client against real servers."""

import gc
import threading
import time

import pytest

from rpc.fake_inference import LAST, Answering, FakeInference, piece, serving_in_thread, within
from twostroke.client import (
    ChatMessage,
    Chunk,
    Client,
    DeadlineError,
    EngineError,
    Finish,
    InvalidRequestError,
    Model,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    RetryPolicy,
    TwostrokeError,
    UnavailableError,
    UnknownModelError,
    Usage,
    WorkerLostError,
)

FAST = RetryPolicy(retries=3, backoff_s=0.001)
HELLO = [Chunk("Hel", (1,)), Chunk("lo", (2,))]


def gone(retry_after_s=0.0):
    return Answering(error=UnavailableError("draining", retry_after_s=retry_after_s))


def hanging():
    return Answering([piece("a", 1)], hang=True)


@pytest.fixture
def routers():
    first, second = FakeInference("first"), FakeInference("second")
    with serving_in_thread(first, second):
        yield first, second


@pytest.fixture
def client(routers):
    with Client([router.target for router in routers], retries=FAST) as client:
        yield client


class Outcome(threading.Thread):
    """A call in a thread of its own."""

    def __init__(self, call):
        super().__init__()
        self.call = call
        self.error = None
        self.start()

    def run(self):
        try:
            self.call()
        except TwostrokeError as error:
            self.error = error

    def result(self):
        self.join(20)
        assert not self.is_alive()
        return self.error


def test_chunks_come_in_order_and_then_the_whole(client):
    stream = client.generate("p")
    assert list(stream) == HELLO
    assert (stream.text, stream.token_ids) == ("Hello", (1, 2))
    assert stream.finish == Finish("length")
    assert stream.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    assert (stream.timeline.prefill_worker_id, stream.timeline.finished_ms) == ("p-1", 7.5)
    assert list(stream) == []


def test_a_chunk_is_here_before_the_answer_ends(client, routers):
    routers[0].script = [hanging()]
    with client.generate("p") as stream:
        assert next(stream) == Chunk("a", (1,))
        with pytest.raises(InvalidRequestError, match="has not ended"):
            _ = stream.usage


def test_complete_returns_the_whole(routers):
    with Client(routers[0].target, api_key="key-1", timeout_s=50) as client:
        completion = client.complete([ChatMessage("user", "hi")], max_tokens=2, temperature=0, request_id="r-1")
        assert (completion.request_id, completion.text, completion.token_ids) == ("r-1", "Hello", (1, 2))
        assert client.list_models(timeout_s=20) == (Model("first", 4096),)
    completing, listing = routers[0].received
    assert completing.request.chat.messages[0].content == "hi"
    assert completing.request.sampling.max_tokens == 2
    assert completing.request.sampling.HasField("temperature")
    assert completing.metadata["authorization"] == listing.metadata["authorization"] == "Bearer key-1"
    # gRPC rounds what is left up to a few digits.
    assert 25 < completing.remaining_s < 51
    assert 0 < listing.remaining_s < 21


def test_nothing_is_sent_before_the_stream_is_entered(client, routers):
    client.generate("p", request_id="dropped")
    kept = client.generate("p", request_id="kept")
    with client.generate("p", request_id="entered"):
        within(routers[0].arrived)
    assert [received.request.request_id for received in routers[0].received] == ["entered"]
    next(kept)
    assert [received.request.request_id for received in routers[0].received] == ["entered", "kept"]


def test_break_cancels_even_while_the_stream_is_held(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")
    for chunk in stream:
        assert chunk.text == "a"
        break
    assert within(script.left) == "r-1"
    assert stream.text == "a"
    with pytest.raises(InvalidRequestError, match="stream of request r-1 is over: its loop was left"):
        next(stream)


def test_an_exception_cancels(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")

    def read():
        for chunk in stream:
            raise RuntimeError(chunk.text)

    with pytest.raises(RuntimeError, match="a"):
        read()
    assert within(script.left) == "r-1"


def test_the_end_of_with_cancels(client, routers):
    routers[0].script = [script := hanging()]
    with client.generate("p", request_id="r-1") as stream:
        next(stream)
    assert within(script.left) == "r-1"
    stream.close()
    with pytest.raises(InvalidRequestError, match="it was closed"):
        next(stream)
    with pytest.raises(InvalidRequestError, match="it was closed"):
        stream.__enter__()


def test_letting_go_cancels(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")
    next(stream)
    del stream
    assert within(script.left) == "r-1"


def test_a_stream_in_a_cycle_is_cancelled_by_the_collector(client, routers):
    routers[0].script = [script := hanging()]
    cycle = {"stream": client.generate("p", request_id="r-1")}
    cycle["self"] = cycle
    next(cycle["stream"])
    del cycle
    gc.collect()
    assert within(script.left) == "r-1"


def test_closing_the_stream_from_another_thread_ends_its_reader(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")
    next(stream)
    reader = Outcome(lambda: next(stream))
    stream.close()
    assert str(reader.result()) == "the stream of request r-1 is over: it was closed"
    assert within(script.left) == "r-1"


def test_closing_the_client_ends_its_calls(routers):
    routers[0].script = [script := hanging(), Answering(hang=True)]
    client = Client(routers[0].target)
    stream = client.generate("p", request_id="r-1")
    next(stream)
    reader = Outcome(lambda: next(stream))
    listing = Outcome(client.list_models)
    client.close()
    client.close()
    assert str(reader.result()) == "the stream of request r-1 is over: its client was closed"
    assert str(listing.result()) == "the client is closed; make a new one"
    assert within(script.left) == "r-1"
    for use in (client.list_models, client.__enter__, lambda: client.complete("p")):
        with pytest.raises(InvalidRequestError, match="the client is closed"):
            use()


@pytest.mark.parametrize("use", [lambda client: client.list_models(), lambda client: client.complete("p")])
def test_closing_the_client_while_a_call_begins(routers, monkeypatch, use):
    client = Client(routers[0].target)
    make_stub = client._stub

    def stub_then_close(target):
        stub = make_stub(target)
        client.close()
        return stub

    monkeypatch.setattr(client, "_stub", stub_then_close)
    with pytest.raises(InvalidRequestError, match="the client is closed"):
        use(client)
    assert routers[0].received == []


def test_closing_the_client_ends_the_wait_between_attempts(routers):
    routers[0].script = [gone(retry_after_s=500)]
    client = Client(routers[0].target, retries=FAST)
    stream = client.generate("p", request_id="r-1")
    reader = Outcome(lambda: next(stream))
    within(routers[0].arrived)
    while stream._call is not None:
        time.sleep(0)
    listing = Outcome(client.list_models)
    client.close()
    assert str(reader.result()) == "the stream of request r-1 is over: its client was closed"
    assert str(listing.result()) == "the client is closed; make a new one"
    assert len(routers[0].received) <= 2


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
        client.complete("p", timeout_s=0.5)
    assert 0.4 < time.monotonic() - begin < 10
    assert routers[1].received[0].remaining_s < 0.31
    assert caught.value.__notes__[0].endswith("attempt 2 of at most 4")


def test_an_answer_without_an_end_is_an_error(client, routers):
    routers[0].script = [Answering([piece("a", 1)])]
    with pytest.raises(TwostrokeError, match="without saying why the answer ended"):
        client.complete("p")


def test_an_error_after_the_end_is_nobodys(client, routers):
    routers[0].script = [Answering([piece("a", 1), LAST], EngineError("too late"))]
    assert client.complete("p").text == "a"


def test_threads_share_a_client(client):
    texts = []
    threads = [Outcome(lambda: texts.append(client.complete("p").text)) for _ in range(8)]
    assert [thread.result() for thread in threads] == [None] * 8
    assert texts == ["Hello"] * 8
