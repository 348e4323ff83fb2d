"""Streaming completions over bare connections, so that the client costs the machine as little as can be."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from twostroke.errors import UnavailableError

MODEL = "bench"
"""The name by which every system serves the model."""

_TIMEOUT_S = 300.0
_FIRST_ID, _LAST_ID = 1000, 40000
_END = b"0\r\n\r\n"
_DATA = b"data: "
_EVENT = re.compile(rb"\ndata: ")


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed answer, as it came: times are seconds of `time.monotonic`."""

    sent_s: float
    first_s: float
    done_s: float
    body: bytes
    pieces: tuple[tuple[float, bytes], ...] = ()
    """The same with its head, as the network delivered it, each piece with its time."""

    @property
    def ttft_s(self) -> float:
        """From sending the request to the first event."""
        return self.first_s - self.sent_s

    def events(self) -> list[dict[str, Any]]:
        """The server-sent events. Raises UnavailableError for one that reports an error and for a missing [DONE]."""
        found = [line[len(_DATA) :] for line in self.body.split(b"\n") if line.startswith(_DATA)]
        if not found or found[-1].strip() != b"[DONE]":
            raise UnavailableError(f"the answer ended early: {self.body[-200:]!r}")
        events = [json.loads(event) for event in found[:-1]]
        for event in events:
            if "error" in event:
                raise UnavailableError(f"the answer ended with an error: {event['error']}")
        return events

    def tokens(self) -> int:
        """How many tokens the server says that it sent."""
        return int(self.events()[-1]["usage"]["completion_tokens"])

    def token_times_s(self) -> list[float]:
        """When each token came; tokens that came joined in one event count at the last event. Raises as `events`."""
        ends = list(accumulate(len(data) for _, data in self.pieces))
        marks = [match.start() for match in _EVENT.finditer(b"".join(data for _, data in self.pieces))]
        came_s = [self.pieces[bisect_right(ends, mark)][0] for mark in marks]
        # The last mark is that of [DONE].
        found = [at_s for event, at_s in zip(self.events(), came_s[:-1], strict=True) if event["choices"]]
        return found + found[-1:] * (self.tokens() - len(found))

    def text(self) -> str:
        """All of its text."""
        return "".join(event["choices"][0]["text"] for event in self.events() if event["choices"])


def request_body(prompt: list[int], max_tokens: int) -> bytes:
    """A streaming completion request of exactly `max_tokens` greedy tokens, usage at its end."""
    fields = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(fields).encode()


def requests(seed: str, prompt_tokens: int, max_tokens: int) -> Iterator[bytes]:
    """Endless requests, no two alike, the same ones for the same seed."""
    source = random.Random(seed)  # noqa: S311 repeatable, not secret
    while True:
        prompt = [source.randrange(_FIRST_ID, _LAST_ID) for _ in range(prompt_tokens)]
        yield request_body(prompt, max_tokens)


class Connection(asyncio.Protocol):
    """One keep-alive HTTP/1.1 connection that streams one answer at a time."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Answer] | None = None
        self._head = b""
        self._parts: list[bytes] = []
        self._times_s: list[float] = []
        self._sent_s = self._first_s = 0.0

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Connects. Raises OSError when nobody listens."""
        _, made = await asyncio.get_running_loop().create_connection(lambda: cls(host), host, port)
        return made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._fail(f"the connection ended in the middle of an answer: {exc or 'closed by the server'}")

    async def ask(self, body: bytes, slo: str = "") -> Answer:
        """Sends a request and waits for the whole answer. Cancellation leaves the connection unusable: close it.

        slo: the class that it names; servers that know of none pass over it.

        Raises UnavailableError for any status but 200, for a broken connection and after five minutes.
        """
        assert self._transport is not None
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
        if slo:
            head += f"x-twostroke-slo: {slo}\r\n"
        self._head, self._parts, self._times_s, self._first_s = b"", [], [], 0.0
        self._answer = asyncio.get_running_loop().create_future()
        self._sent_s = time.monotonic()
        self._transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                return await self._answer
        except TimeoutError as error:
            raise UnavailableError(f"no complete answer within {_TIMEOUT_S:.0f} s") from error
        finally:
            self._answer = None

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        now_s = time.monotonic()
        if self._answer is None:
            return
        if not self._first_s:
            data = self._head = self._head + data
            if self._refused(data) or _DATA not in data:
                return
            self._first_s = now_s
        self._parts.append(data)
        self._times_s.append(now_s)
        # Of an answer that is under way only the end is looked for; a short piece may hold a part of it.
        tail = data if len(data) >= len(_END) or len(self._parts) == 1 else b"".join(self._parts[-len(_END) :])
        if tail.endswith(_END):
            self._finish(now_s)

    def _refused(self, data: bytes) -> bool:
        head, separator, rest = data.partition(b"\r\n\r\n")
        status = head.split(b"\r\n")[0]
        if not separator or b" 200 " in status:
            return False
        self._fail(f"{status.decode(errors='replace')}: {rest[:300].decode(errors='replace')}")
        return True

    def _finish(self, done_s: float) -> None:
        assert self._answer is not None
        _, _, body = b"".join(self._parts).partition(b"\r\n\r\n")
        if not self._answer.done():
            pieces = tuple(zip(self._times_s, self._parts, strict=True))
            self._answer.set_result(Answer(self._sent_s, self._first_s, done_s, dechunk(body), pieces))

    def _fail(self, message: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(UnavailableError(message))

    def close(self) -> None:
        """Closes the connection at once."""
        if self._transport is not None:
            self._transport.abort()


def dechunk(body: bytes) -> bytes:
    """The content of a chunked HTTP body. Raises UnavailableError when its last chunk is missing."""
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.find(b"\r\n", at)
        size = body[at:end].split(b";")[0]
        if end < 0 or not size:
            raise UnavailableError(f"not a complete chunked body: {body[-100:]!r}")
        length = int(size, 16)
        if length == 0:
            return b"".join(parts)
        parts.append(body[end + 2 : end + 2 + length])
        at = end + 2 + length + 2


@dataclass(slots=True)
class Load:
    """What one measurement saw."""

    started_s: float
    ended_s: float = 0.0
    answers: list[Answer] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """From the first request to the end of the last answer."""
        return self.ended_s - self.started_s


async def drive(
    address: tuple[str, int], bodies: Iterator[bytes], streams: int, seconds: float, begin: Callable[[], None]
) -> Load:
    """Keeps `streams` answers under way for `seconds`, at least one a stream, and lets the last ones end.

    `begin` is called when all connections stand and nothing is sent yet. Raises UnavailableError when any request
    fails, and then gives the others up; so does cancellation.
    """
    connections: list[Connection] = []
    try:
        while len(connections) < streams:
            connections.append(await Connection.open(*address))
        begin()
        load = Load(time.monotonic())
        async with asyncio.TaskGroup() as group:
            for connection in connections:
                group.create_task(_ask_until(load.started_s + seconds, connection, bodies, load))
        load.ended_s = time.monotonic()
        return load
    except (OSError, BaseExceptionGroup) as error:
        cause = error.exceptions[0] if isinstance(error, BaseExceptionGroup) else error
        raise UnavailableError(f"{address[0]}:{address[1]}: {cause}") from error
    finally:
        for connection in connections:
            connection.close()


async def _ask_until(deadline_s: float, connection: Connection, bodies: Iterator[bytes], load: Load) -> None:
    while True:
        load.answers.append(await connection.ask(next(bodies)))
        if time.monotonic() >= deadline_s:
            return


async def get_status(host: str, port: int, path: str) -> int:
    """The HTTP status of a GET; 0 when nobody answers."""
    try:
        async with asyncio.timeout(2):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                words = (await reader.readline()).split()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return 0
    return int(words[1]) if len(words) > 1 and words[1].isdigit() else 0
