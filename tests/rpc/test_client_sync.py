"""The blocking client against real servers: streams, and how they are left."""

import gc
import threading
import time

import pytest

from rpc.fake_inference import (
    FAST,
    HELLO,
    Answering,
    FakeInference,
    gone,
    hanging,
    serving_in_thread,
    within,
)
from twostroke.client import (
    ChatMessage,
    Chunk,
    Client,
    Finish,
    InvalidRequestError,
    Model,
    TwostrokeError,
    Usage,
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


def test_closing_the_stream_while_its_call_begins(client, routers, monkeypatch):
    stream = client.generate("p", request_id="r-1")
    open_call = client._open

    def open_then_miss_it(*arguments):
        call = open_call(*arguments)
        stream.close()
        return call

    routers[0].script = [hanging()]
    monkeypatch.setattr(client, "_open", open_then_miss_it)
    with pytest.raises(InvalidRequestError, match="stream of request r-1 is over: it was closed"):
        next(stream)
    assert stream._call.cancelled()


def test_an_iterator_that_was_never_advanced_cancels_nothing(client):
    stream = client.generate("p")
    iter(stream)
    assert list(stream) == HELLO


def test_closing_the_client_ends_the_wait_between_attempts(routers):
    routers[0].script = [gone(retry_after_s=500)]
    client = Client(routers[0].target, retries=FAST)
    stream = client.generate("p", request_id="r-1")
    reader = Outcome(lambda: next(stream))
    within(routers[0].arrived)
    while stream._call is not None:
        time.sleep(0)
    client.close()
    assert str(reader.result()) == "the stream of request r-1 is over: its client was closed"
    assert len(routers[0].received) == 1


def test_closing_the_client_ends_the_wait_of_list_models(routers, monkeypatch):
    waiting = threading.Event()

    class Closed(threading.Event):
        def wait(self, timeout=None):
            waiting.set()
            return super().wait(timeout)

    routers[0].script = [gone(retry_after_s=500)]
    client = Client(routers[0].target)
    monkeypatch.setattr(client, "_closed", Closed())
    listing = Outcome(client.list_models)
    assert waiting.wait(20)
    client.close()
    assert str(listing.result()) == "the client is closed; make a new one"
    assert len(routers[0].received) == 1


def test_threads_share_a_client(client):
    texts = []
    threads = [Outcome(lambda: texts.append(client.complete("p").text)) for _ in range(8)]
    assert [thread.result() for thread in threads] == [None] * 8
    assert texts == ["Hello"] * 8
