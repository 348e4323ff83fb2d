"""A source in a process of its own, for tests of transports."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from twostroke.bench.kv_source import anonymous, pattern
from twostroke.kv.transport import Event, Peer, PeerReady, Rows, Ticket, TicketDone, TicketFailed, Transport

E = TypeVar("E")


class SourceProcess:
    """`python -m twostroke.bench.kv_source`, with its lines in a queue."""

    def __init__(
        self,
        nbytes: int,
        *,
        name: str = "source",
        seed: int = 1,
        regions: int = 1,
        backend: str = "ucx",
        **options: str,
    ) -> None:
        arguments = ["--name", name, "--nbytes", str(nbytes), "--seed", str(seed), "--regions", str(regions)]
        arguments += ["--backend", backend, *(f"--option={key}={value}" for key, value in options.items())]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.bench.kv_source", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()
        first = self.line()
        self.address, self.base, self.nbytes = bytes.fromhex(first["address"]), first["base"], nbytes
        self.content = pattern(nbytes, seed)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                self._lines.put(json.loads(text))

    def line(self, timeout_s: float = 40.0) -> dict[str, Any]:
        """The next line; raises queue.Empty."""
        return self._lines.get(timeout=timeout_s)

    def line_while(self, transport: Transport, timeout_s: float = 10.0) -> dict[str, Any]:
        """The next line, while the transport makes progress."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            assert not transport.poll(0.01)
            if not self._lines.empty():
                return self._lines.get()
        raise TimeoutError("the source said nothing")

    def tell(self, command: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Destination:
    """Registered local memory and the rows that fill it from a source."""

    def __init__(self, transport: Transport, nbytes: int, regions: int = 1) -> None:
        self.memory = anonymous(nbytes)
        for start in range(0, nbytes, nbytes // regions):
            transport.register(self.memory.ctypes.data + start, nbytes // regions)

    def rows(self, source: SourceProcess, block: int, seed: int = 3) -> Rows:
        """Every block of the source, each to another place."""
        count = self.memory.nbytes // block
        random = np.random.default_rng(seed)
        here, there = (base + random.permutation(count) * block for base in (self.memory.ctypes.data, source.base))
        return np.stack([here, there, np.full(count, block)], axis=1).astype(np.int64)

    def right(self, source: SourceProcess, rows: Rows) -> bool:
        """Whether all bytes of the rows are the source's."""
        return all(
            np.array_equal(
                self.memory[local - self.memory.ctypes.data :][:nbytes], source.content[remote - source.base :][:nbytes]
            )
            for local, remote, nbytes in rows.tolist()
        )


def wait_for(transport: Transport, kind: type[E], timeout_s: float = 20.0, seen: list[Event] | None = None) -> E:
    """Polls until an event of the kind comes; others go to `seen`, or fail the test."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        events = transport.poll(end - time.monotonic())
        found = [event for event in events if isinstance(event, kind)]
        rest = [event for event in events if not isinstance(event, kind)]
        if seen is None:
            assert not rest, rest
        else:
            seen += rest
        if found:
            assert len(found) == 1, found
            return found[0]
    raise TimeoutError(f"no {kind.__name__} within {timeout_s} s")


def connected(transport: Transport, source: SourceProcess, peer_id: str = "source") -> Peer:
    """Connects and waits until it stands."""
    peer = transport.connect(peer_id, source.address)
    assert wait_for(transport, PeerReady).peer == peer
    return peer


def outcome(transport: Transport, ticket: Ticket, timeout_s: float = 20.0) -> TicketDone | TicketFailed:
    """The ticket's event; others are dropped."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        for event in transport.poll(end - time.monotonic()):
            if isinstance(event, TicketDone | TicketFailed) and event.ticket == ticket:
                return event
    raise TimeoutError("no outcome")


def until(condition: Callable[[], bool], transport: Transport, timeout_s: float = 10.0) -> None:
    """Polls until the condition holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "the condition never held"
        transport.poll(0.01)
