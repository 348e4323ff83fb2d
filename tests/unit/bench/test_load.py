import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from twostroke.bench.load import Connection, dechunk, drive, get_status, request_body, requests
from twostroke.errors import UnavailableError

Reply = Callable[[dict[str, object], asyncio.StreamWriter], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(text: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": text}]}).encode() + b"\n\n"


USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def server(reply: Reply) -> AsyncIterator[tuple[str, int]]:
    """Answers every request of every connection with `reply`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
                await reply(json.loads(await reader.readexactly(length)), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    made = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with made:
        host, port = made.sockets[0].getsockname()
        yield host, port


async def answer(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + chunk(event("one ")) + chunk(event("two")) + chunk(USAGE) + chunk(DONE) + b"0\r\n\r\n")


async def test_an_answer_is_read_however_its_bytes_are_cut() -> None:
    whole = HEAD + chunk(event("one ")) + chunk(event("two")) + chunk(USAGE + DONE) + b"0\r\n\r\n"

    async def byte_by_byte(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        for byte in whole:
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0)

    for reply in (answer, byte_by_byte):
        async with server(reply) as address:
            connection = await Connection.open(*address)
            for _ in range(2):
                got = await connection.ask(request_body([1, 2, 3], 2))
                assert got.text() == "one two"
                assert got.tokens() == 2
                assert 0 <= got.ttft_s <= got.done_s - got.sent_s
            connection.close()


async def test_the_first_token_is_timed_when_it_comes_not_when_the_head_comes() -> None:
    head_read, go_on = asyncio.Event(), asyncio.Event()

    async def late(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD)
        await writer.drain()
        head_read.set()
        await go_on.wait()
        writer.write(chunk(event("one")) + chunk(DONE) + b"0\r\n\r\n")

    async with server(late) as address:
        connection = await Connection.open(*address)
        asking = asyncio.create_task(connection.ask(request_body([1], 1)))
        await head_read.wait()
        loop = asyncio.get_running_loop()
        released_s = loop.time()
        go_on.set()
        got = await asking
        assert got.first_s >= released_s
        connection.close()


async def test_a_refused_request_says_what_the_server_said() -> None:
    async def refuse(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 16\r\n\r\nno decode worker")

    async with server(refuse) as address:
        connection = await Connection.open(*address)
        with pytest.raises(UnavailableError, match=r"503 Service Unavailable: no decode worker"):
            await connection.ask(request_body([1], 1))
        connection.close()


async def test_an_answer_that_breaks_off_is_an_error() -> None:
    async def break_off(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event("one")))
        await writer.drain()
        writer.close()

    async with server(break_off) as address:
        with pytest.raises(UnavailableError, match="ended in the middle of an answer"):
            await drive(address, requests("x", 4, 2), 2, 1.0, lambda: None)


async def test_a_stream_that_ends_without_done_is_an_error() -> None:
    async def no_done(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(event("one")) + b"0\r\n\r\n")

    async with server(no_done) as address:
        connection = await Connection.open(*address)
        got = await connection.ask(request_body([1], 1))
        with pytest.raises(UnavailableError, match="ended early"):
            got.events()
        connection.close()


async def test_an_error_in_the_middle_of_a_stream_is_an_error() -> None:
    async def fail(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        problem = b'data: {"error": {"message": "decode worker lost"}}\n\n'
        writer.write(HEAD + chunk(event("one")) + chunk(problem) + chunk(DONE) + b"0\r\n\r\n")

    async with server(fail) as address:
        connection = await Connection.open(*address)
        got = await connection.ask(request_body([1], 1))
        with pytest.raises(UnavailableError, match="decode worker lost"):
            got.tokens()
        connection.close()


async def test_load_keeps_exactly_the_wanted_streams_under_way() -> None:
    running, most = 0, 0
    all_here = asyncio.Event()

    async def together(request: dict[str, object], writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 3:
            all_here.set()
        await all_here.wait()
        await answer(request, writer)
        running -= 1

    began = []
    async with server(together) as address:
        load = await drive(address, requests("x", 4, 2), 3, 0.0, lambda: began.append(running))
    assert began == [0]
    assert most == 3
    assert len(load.answers) == 3
    assert load.duration_s > 0


async def test_load_on_a_port_where_nobody_listens_names_it() -> None:
    async with server(answer) as address:
        pass
    with pytest.raises(UnavailableError, match=f"{address[0]}:{address[1]}"):
        await drive(address, requests("x", 4, 2), 1, 0.1, lambda: None)
    assert await get_status(*address, "/health") == 0


def test_requests_are_the_same_for_a_seed_and_differ_within_it() -> None:
    first = list(itertools.islice(requests("1 8", 100, 64), 20))
    assert first == list(itertools.islice(requests("1 8", 100, 64), 20))
    assert first != list(itertools.islice(requests("2 8", 100, 64), 20))
    prompts = [tuple(json.loads(body)["prompt"]) for body in first]
    assert len(set(prompts)) == 20
    assert {len(prompt) for prompt in prompts} == {100}
    asked = json.loads(first[0])
    assert (asked["max_tokens"], asked["ignore_eos"], asked["stream"], asked["temperature"]) == (64, True, True, 0)


@pytest.mark.parametrize("body", [b"", b"5\r\nhello\r\n", b"\r\n"])
def test_a_chunked_body_without_its_last_chunk_is_refused(body: bytes) -> None:
    with pytest.raises(UnavailableError):
        dechunk(body)


def test_chunks_may_carry_extensions_and_line_ends() -> None:
    assert dechunk(b"6;x=1\r\na\r\nb\r\n\r\n2\r\nok\r\n0\r\n\r\n") == b"a\r\nb\r\nok"
