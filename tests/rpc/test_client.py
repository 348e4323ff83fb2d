"""The asynchronous client against real servers: streams, and how they are left."""

import asyncio
import gc
import threading

import pytest

from rpc.fake_inference import (
    FAST,
    HELLO,
    Answering,
    FakeInference,
    gone,
    hanging,
    seen,
    serving,
)
from twostroke.client import (
    AsyncClient,
    ChatMessage,
    Chunk,
    Finish,
    InvalidRequestError,
    Model,
    UnavailableError,
    Usage,
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


async def test_an_iterator_that_was_never_advanced_cancels_nothing(client):
    stream = client.generate("p")
    aiter(stream)
    assert [chunk async for chunk in stream] == HELLO


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
    stream = client.generate("p", request_id="r-1")

    async def read():
        async for _ in stream:
            got_one.set()
            if not in_read:
                await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await got_one.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await seen(script.left) == "r-1"
    with pytest.raises(InvalidRequestError, match="its task was cancelled" if in_read else "its loop was left"):
        await anext(stream)


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
