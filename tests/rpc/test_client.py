"""The asynchronous client against real servers."""

import asyncio
import gc
import math
import threading
import time

import pytest

from rpc.fake_inference import LAST, Answering, FakeInference, piece, seen, serving
from twostroke.client import (
    AsyncClient,
    ChatMessage,
    Chunk,
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
async def routers():
    first, second = FakeInference("first"), FakeInference("second")
    async with serving(first, second):
        yield first, second


@pytest.fixture
async def client(routers):
    async with AsyncClient([router.target for router in routers], retries=FAST) as client:
        yield client


async def test_chunks_come_in_order_and_then_the_whole(client):
    stream = client.generate("p")
    assert [chunk async for chunk in stream] == HELLO
    assert (stream.text, stream.token_ids) == ("Hello", (1, 2))
    assert stream.finish == Finish("length")
    assert stream.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    assert (stream.timeline.prefill_worker_id, stream.timeline.finished_ms) == ("p-1", 7.5)
    assert [chunk async for chunk in stream] == []


async def test_a_chunk_is_here_before_the_answer_ends(client, routers):
    routers[0].script = [hanging()]
    async with client.generate("p") as stream:
        assert await anext(stream) == Chunk("a", (1,))
        assert stream.text == "a"
        with pytest.raises(InvalidRequestError, match="has not ended"):
            _ = stream.usage


async def test_complete_returns_the_whole(client, routers):
    completion = await client.complete([ChatMessage("user", "hi")], max_tokens=2, temperature=0, request_id="r-1")
    assert (completion.request_id, completion.text, completion.token_ids) == ("r-1", "Hello", (1, 2))
    (received,) = routers[0].received
    assert received.request.chat.messages[0].content == "hi"
    assert received.request.sampling.max_tokens == 2
    assert received.request.sampling.HasField("temperature")
    assert received.remaining_s is None
    assert "authorization" not in received.metadata


async def test_the_api_key_is_a_bearer_token(routers):
    async with AsyncClient(routers[0].target, api_key="key-1") as client:
        await client.complete("p")
        await client.list_models()
    assert [received.metadata["authorization"] for received in routers[0].received] == ["Bearer key-1"] * 2


async def test_models(client):
    assert await client.list_models() == (Model("first", 4096),)


async def test_nothing_is_sent_before_the_stream_is_entered(client, routers):
    client.generate("p", request_id="dropped")
    kept = client.generate("p", request_id="kept")
    async with client.generate("p", request_id="entered"):
        await seen(routers[0].arrived)
    assert [received.request.request_id for received in routers[0].received] == ["entered"]
    await anext(kept)
    assert [received.request.request_id for received in routers[0].received] == ["entered", "kept"]
    await kept.close()


async def test_break_cancels_even_while_the_stream_is_held(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")
    async for chunk in stream:
        assert chunk.text == "a"
        break
    assert await seen(script.left) == "r-1"
    assert stream.text == "a"
    with pytest.raises(InvalidRequestError, match="stream of request r-1 is over: its loop was left"):
        await anext(stream)


async def test_an_exception_cancels(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")

    async def read():
        async for chunk in stream:
            raise RuntimeError(chunk.text)

    with pytest.raises(RuntimeError, match="a"):
        await read()
    assert await seen(script.left) == "r-1"


async def test_the_end_of_async_with_cancels(client, routers):
    routers[0].script = [script := hanging()]
    async with client.generate("p", request_id="r-1") as stream:
        await anext(stream)
    assert await seen(script.left) == "r-1"
    await stream.close()
    with pytest.raises(InvalidRequestError, match="it was closed"):
        await anext(stream)
    with pytest.raises(InvalidRequestError, match="it was closed"):
        await stream.__aenter__()


@pytest.mark.parametrize("in_read", [True, False])
async def test_cancelling_the_task_cancels(client, routers, in_read):
    routers[0].script = [script := hanging()]
    got_one = asyncio.Event()

    async def read():
        async for _ in client.generate("p", request_id="r-1"):
            got_one.set()
            if not in_read:
                await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await got_one.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await seen(script.left) == "r-1"


async def test_a_timeout_around_complete_cancels(client, routers):
    routers[0].script = [script := Answering(hang=True)]
    task = asyncio.create_task(client.complete("p", request_id="r-1"))
    await seen(routers[0].arrived)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(task, 0.001)
    assert await seen(script.left) == "r-1"


async def test_letting_go_cancels(client, routers):
    routers[0].script = [script := hanging()]
    stream = client.generate("p", request_id="r-1")
    await anext(stream)
    del stream
    assert await seen(script.left) == "r-1"


async def test_letting_go_in_another_thread_cancels(client, routers):
    routers[0].script = [script := hanging()]
    held = [client.generate("p", request_id="r-1")]
    await anext(held[0])
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert await seen(script.left) == "r-1"


async def test_a_stream_in_a_cycle_is_cancelled_by_the_collector(client, routers):
    routers[0].script = [script := hanging()]
    cycle = {"stream": client.generate("p", request_id="r-1")}
    cycle["self"] = cycle
    await anext(cycle["stream"])
    del cycle
    gc.collect()
    assert await seen(script.left) == "r-1"


async def test_closing_the_client_ends_its_streams(routers):
    routers[0].script = [script := hanging()]
    client = AsyncClient(routers[0].target)
    stream = client.generate("p", request_id="r-1")
    await anext(stream)
    reader = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    await client.close()
    await client.close()
    with pytest.raises(InvalidRequestError, match="stream of request r-1 is over: its client was closed"):
        await reader
    assert await seen(script.left) == "r-1"
    for use in (client.list_models, client.__aenter__, lambda: client.complete("p")):
        with pytest.raises(InvalidRequestError, match="the client is closed"):
            await use()


async def test_closing_the_client_ends_list_models(routers):
    routers[0].script = [Answering(hang=True)]
    client = AsyncClient(routers[0].target)
    listing = asyncio.create_task(client.list_models())
    await seen(routers[0].arrived)
    await client.close()
    with pytest.raises(InvalidRequestError, match="the client is closed"):
        await listing


async def test_closing_ends_the_wait_between_attempts(routers):
    routers[0].script = [gone(retry_after_s=500)]
    client = AsyncClient(routers[0].target, retries=FAST)
    stream = client.generate("p")
    reader = asyncio.create_task(anext(stream))
    listing = asyncio.create_task(client.list_models())
    await seen(routers[0].arrived)
    while stream._call is not None:  # noqa: ASYNC110 - a client tells nobody that it waits
        await asyncio.sleep(0)
    await client.close()
    with pytest.raises(InvalidRequestError, match="its client was closed"):
        await reader
    with pytest.raises(InvalidRequestError, match="the client is closed"):
        await listing
    assert len(routers[0].received) <= 2


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
    assert await client.list_models() == (Model("second", 4096),)


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
        await client.complete("p", timeout_s=0.5)
    assert 0.4 < time.monotonic() - begin < 10
    assert routers[1].received[0].remaining_s < 0.31
    assert caught.value.__notes__[0].endswith("attempt 2 of at most 4")


async def test_the_deadline_ends_a_stream_that_has_begun(client, routers):
    routers[0].script = [hanging()]
    stream = client.generate("p", timeout_s=0.5)
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


def test_a_client_belongs_to_one_loop():
    client = AsyncClient("127.0.0.1:1", retries=0)
    with pytest.raises(UnavailableError):
        asyncio.run(client.list_models())
    with pytest.raises(InvalidRequestError, match="make one client per loop"):
        asyncio.run(client.list_models())


async def test_streams_run_side_by_side(client):
    completions = await asyncio.gather(*(client.complete("p", request_id=f"r-{i}") for i in range(20)))
    assert [completion.request_id for completion in completions] == [f"r-{i}" for i in range(20)]
    assert {completion.text for completion in completions} == {"Hello"}
