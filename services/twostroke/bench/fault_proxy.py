"""A TCP proxy that can cut, or swallow, what goes through it: the network between a router and a worker."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import suppress

_CHUNK_BYTES = 1 << 16


class FaultProxy:
    """Listens on a port of its own and passes on to `target`. Use it as an async context manager."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self._open.set()
        self.reset()

    @property
    def address(self) -> str:
        """host:port to connect to instead of the target."""
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def reset(self) -> None:
        """Ends every connection with a reset on both sides; new ones are taken."""
        for writer in list(self._writers):
            with suppress(OSError):
                sock: socket.socket = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

    def swallow(self) -> None:
        """From now on takes bytes and passes none on, as a broken switch does; connections stay."""
        self._open.clear()

    def heal(self) -> None:
        """Passes on again, what was held back first."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            self._writers.discard(writer)
            return
        self._writers.add(there_writer)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pass_on(reader, there_writer))
                group.create_task(self._pass_on(there_reader, writer))
        except* (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            for each in (writer, there_writer):
                each.transport.abort()
                self._writers.discard(each)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError
