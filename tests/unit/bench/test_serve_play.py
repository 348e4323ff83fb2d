import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from twostroke.bench.load import Answer
from twostroke.bench.serve.play import play
from twostroke.bench.serve.traffic import CHAT, Arrival, bodies

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


ONE = event(choices=[{"text": "say \ndata: "}])
USAGE = event(choices=[], usage={"completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


def test_tokens_have_the_times_of_their_events() -> None:
    pieces = [(1.0, HEAD + chunk(ONE)), (2.0, chunk(ONE)[:7]), (3.0, chunk(ONE)[7:]), (4.0, chunk(USAGE + DONE))]
    answer = Answer(0.0, 1.0, 4.0, ONE + ONE + USAGE + DONE, tuple(pieces))
    # Two events for three tokens: the joined one counts at the last event.
    assert answer.token_times_s() == [1.0, 2.0, 2.0]


@asynccontextmanager
async def server() -> AsyncIterator[tuple[tuple[str, int], list[int]]]:
    """Answers with as many tokens as are asked for, all at once; prompts of one token are refused."""
    asked: list[int] = []

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length:"))
        request = json.loads(await reader.readexactly(length))
        asked.append(len(request["prompt"]))
        if len(request["prompt"]) == 1:
            writer.write(b"HTTP/1.1 503 Busy\r\n\r\nfull")
        else:
            usage = event(choices=[], usage={"completion_tokens": 2})
            writer.write(HEAD + chunk(ONE) + chunk(ONE) + chunk(usage + DONE) + b"0\r\n\r\n")
        writer.close()

    made = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with made:
        host, port = made.sockets[0].getsockname()
        yield (host, port), asked


async def test_requests_are_sent_in_their_order_and_failures_are_part_of_what_is_seen() -> None:
    mix = [Arrival(0.05, CHAT, 1, 2), Arrival(0.0, CHAT, 3, 2), Arrival(0.1, CHAT, 4, 5)]
    began: list[bool] = []
    async with server() as (address, asked):
        seen = await play(address, mix, bodies(mix, "x"), lambda: began.append(True))
    assert began == [True]
    assert asked == [3, 1, 4]
    assert [each.arrival for each in seen] == mix
    assert "503 Busy: full" in seen[0].error
    assert seen[1].error == ""
    assert len(seen[1].tokens_s) == 2
    assert seen[1].tokens_s[0] >= seen[1].sent_s >= 0.0
    assert seen[1].ttft_s > 0
    assert seen[2].error == "the answer has 2 tokens instead of 5"
    assert all(each.sent_s >= each.arrival.arrival_s - 0.01 for each in seen)


async def test_a_system_that_is_gone_fails_every_request() -> None:
    mix = [Arrival(0.0, CHAT, 3, 2)]
    async with server() as (address, _):
        pass
    (seen,) = await play(address, mix, bodies(mix, "x"), lambda: None)
    assert seen.error
    assert seen.ttft_s != pytest.approx(seen.ttft_s)
