"""A process that offers memory over a transport, for benchmarks and tests: `python -m twostroke.bench.kv_source`.

It prints one JSON line when it is ready, `{"address": hex, "base": int, "nbytes": int}`, and one per event after it.
Commands come as lines on standard input: `connect ID HEX`, `signal ID TEXT`, `read ID BASE` (as much as it offers
itself, again and again, over its own memory), `fence ID`, `cpu`, `close`. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import json
import mmap
import queue
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from twostroke.kv.backends import open_transport
from twostroke.kv.transport import Peer, PeerLost, PeerReady, SignalReceived, Transport

Bytes = npt.NDArray[np.uint8]


def anonymous(nbytes: int) -> Bytes:
    """Zeroed private memory of whole pages, all of them touched."""
    return _mapped(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def shared(descriptor: int, nbytes: int) -> Bytes:
    """The same pages for every process that maps this descriptor of os.memfd_create; zeroed."""
    return _mapped(mmap.mmap(descriptor, nbytes, flags=mmap.MAP_SHARED))


def _mapped(pages: mmap.mmap) -> Bytes:
    memory = np.frombuffer(pages, dtype=np.uint8)
    memory[:] = 0
    return memory


def pattern(nbytes: int, seed: int) -> Bytes:
    """Bytes of which no two aligned words are equal; nbytes is a multiple of 8."""
    words = np.arange(seed, seed + nbytes // 8, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def say(**values: object) -> None:
    """One JSON line, at once."""
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class Source:
    """Runs one transport on the main thread and takes commands from another."""

    def __init__(self, transport: Transport, memory: Bytes) -> None:
        self._transport = transport
        self._memory = memory
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._peers: dict[str, Peer] = {}

    def read_commands(self) -> None:
        """The other thread."""
        for line in sys.stdin:
            self._commands.put(line.strip())
            self._transport.wake()
        self._commands.put("close")
        self._transport.wake()

    def run(self) -> None:
        """Until a close."""
        while True:
            for event in self._transport.poll(10.0):
                if isinstance(event, SignalReceived):
                    say(event="signal", sender=event.sender, payload=event.payload.decode())
                elif isinstance(event, PeerReady):
                    say(event="ready", peer=event.peer.peer_id)
                elif isinstance(event, PeerLost):
                    say(event="lost", peer=event.peer.peer_id, message=event.message)
            for command in self._taken():
                if command == "close":
                    self._transport.close()
                    say(event="closed")
                    return
                self._obey(*command.split(" "))

    def _taken(self) -> Iterator[str]:
        while not self._commands.empty():
            yield self._commands.get()

    def _obey(self, verb: str, peer_id: str = "", value: str = "") -> None:
        if verb == "connect":
            self._peers[peer_id] = self._transport.connect(peer_id, bytes.fromhex(value))
        elif verb == "signal":
            self._transport.signal(self._peers[peer_id], value.encode())
        elif verb == "read":
            rows = np.array([[self._memory.ctypes.data, int(value), self._memory.nbytes]] * 64, dtype=np.int64)
            for _ in range(64):
                self._transport.get_batch(self._peers[peer_id], rows, 600.0)
            say(event="reading")
        elif verb == "fence":
            self._transport.fence(self._peers.pop(peer_id))
            say(event="fenced", peer=peer_id)
        elif verb == "cpu":
            say(event="cpu", process_s=time.process_time())


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="source")
    parser.add_argument("--backend", default="ucx")
    parser.add_argument("--library", default="")
    parser.add_argument("--nbytes", type=int, default=1 << 20)
    parser.add_argument("--regions", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--descriptor", type=int, default=-1)
    parser.add_argument("--option", action="append", default=[])
    flags = parser.parse_args()
    options = dict(option.split("=", 1) for option in flags.option)
    transport = open_transport(flags.backend, flags.name, library=flags.library, options=options)
    memory = anonymous(flags.nbytes) if flags.descriptor < 0 else shared(flags.descriptor, flags.nbytes)
    memory[:] = pattern(flags.nbytes, flags.seed)
    share = flags.nbytes // flags.regions
    for start in range(0, flags.nbytes, share):
        transport.register(memory.ctypes.data + start, share)
    source = Source(transport, memory)
    threading.Thread(target=source.read_commands, daemon=True).start()
    say(address=transport.address().hex(), base=memory.ctypes.data, nbytes=flags.nbytes)
    source.run()


if __name__ == "__main__":
    main()
