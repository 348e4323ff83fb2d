"""A transport here and a source process to read from, for benchmarks of transports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twostroke.bench.kv_source import anonymous, pattern, shared
from twostroke.config import child_environment
from twostroke.errors import UnavailableError
from twostroke.kv.backends import open_transport
from twostroke.kv.nixl_agent import NixlTransport
from twostroke.kv.transport import Event, Peer, PeerReady, Rows, Ticket, TicketDone, TicketFailed, Transport


class KvPair:
    """Owns both; `close` ends both. progress_thread: NIXL's, on this side. descriptors: of shared memory for this side
    and the source's; without, each has its own. Raises UnavailableError when the source does not start or answer."""

    def __init__(
        self,
        backend: str,
        nbytes: int,
        options: Mapping[str, str],
        *,
        progress_thread: bool = False,
        descriptors: tuple[int, int] | None = None,
    ) -> None:
        self.nbytes = nbytes
        self.memory = shared(descriptors[0], nbytes) if descriptors else anonymous(nbytes)
        self._inherited = descriptors[1:] if descriptors else ()
        self.transport: Transport = (
            NixlTransport("reader", options=options, progress_thread=True)
            if progress_thread
            else open_transport(backend, "reader", options=options)
        )
        self.transport.register(self.memory.ctypes.data, nbytes)
        self._command = [sys.executable, "-m", "twostroke.bench.kv_source", "--backend", backend]
        self._command += ["--nbytes", str(nbytes), *(f"--option={name}={value}" for name, value in options.items())]
        self._command += [f"--descriptor={descriptor}" for descriptor in self._inherited]
        self.content = pattern(nbytes, 1)
        self._number = 0
        self.peer: Peer | None = None
        self.start_source()

    def start_source(self) -> None:
        """A new source process, to be connected to."""
        self._number += 1
        self.source = subprocess.Popen(
            [*self._command, "--name", f"source-{self._number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=child_environment(),
            pass_fds=self._inherited,
        )
        first = self.line()
        self.base: int = first["base"]
        self._address = bytes.fromhex(first["address"])

    def line(self) -> dict[str, Any]:
        """The source's next line; blocks."""
        assert self.source.stdout is not None
        for text in self.source.stdout:
            if text.startswith("{"):
                result: dict[str, Any] = json.loads(text)
                return result
        raise UnavailableError("the source process ended")

    def source_cpu_s(self) -> float:
        """CPU time of the source so far."""
        assert self.source.stdin is not None
        self.source.stdin.write("cpu\n")
        self.source.stdin.flush()
        while (line := self.line()).get("event") != "cpu":
            pass
        return float(line["process_s"])

    def connect(self) -> Peer:
        """Connects and waits until the connection stands."""
        self.peer = self.transport.connect("source", self._address, 10.0)
        end = time.monotonic() + 10.0
        while time.monotonic() < end:
            if any(event == PeerReady(self.peer) for event in self.transport.poll(0.1)):
                return self.peer
        raise UnavailableError("the source does not answer")

    def rows(self, block: int, count: int, random: np.random.Generator) -> Rows:
        """`count` blocks, from scattered to scattered places."""
        here, there = (
            base + random.permutation(self.nbytes // block)[:count] * block
            for base in (self.memory.ctypes.data, self.base)
        )
        return np.stack([here, there, np.full(count, block)], axis=1).astype(np.int64)

    def right(self, rows: Rows) -> bool:
        """Whether the rows hold the source's bytes."""
        here, there = self.memory.ctypes.data, self.base
        return all(
            np.array_equal(self.memory[local - here :][:nbytes], self.content[remote - there :][:nbytes])
            for local, remote, nbytes in rows.tolist()
        )

    def outcome(self, ticket: Ticket, polled: Sequence[Event] = ()) -> TicketDone | TicketFailed:
        """Polls until the ticket is over, if it is not by the events polled already."""
        events = list(polled)
        while True:
            for event in events:
                if isinstance(event, TicketDone | TicketFailed) and event.ticket == ticket:
                    return event
            events = self.transport.poll(1.0)

    def alive(self) -> bool:
        """Whether the source process runs."""
        return self.source.poll() is None

    def close(self) -> None:
        """Ends both."""
        if self.alive():
            self.source.send_signal(signal.SIGCONT)
        self.source.kill()
        self.source.communicate()
        self.transport.close()
