"""A rank that offers KV without an engine, for tests and benchmarks of hand-offs: `python -m twostroke.bench.kv_rank`.

It prints one JSON line when it is ready, `{"address": hex, "memory": hex}`, and one per event after it, with `event`
and `id`: offered (with slot and generation), joined, renewed, done, withdrawn, corrupted, dropped, cpu, fatal. Commands
come as lines on standard input: `offer ID`, `join ID` (an offer whose hold another rank of the worker has taken),
`announce ID FIRST BLOCK,BLOCK...`, `finish ID BLOCKS TOKEN`, `withdraw ID`, `corrupt BLOCK` (flips a byte in its first
layer), `read ID NAME ADDRESS MEMORY SLOT GENERATION BLOCKS` (from the rank of that name into the first blocks here),
`drop PREFIX`, `cpu`, `quit`. It ends with its standard input.
"""

from __future__ import annotations

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from twostroke.bench.kv_source import anonymous, pattern, say
from twostroke.kv.backends import open_transport
from twostroke.kv.holds import Holds, HoldTable
from twostroke.kv.memory import Blocks, slice_between
from twostroke.kv.mover import Callbacks, Mover
from twostroke.kv.receive import Part, Receive
from twostroke.v1.kv_pb2 import KvMemory

Kv = npt.NDArray[np.uint8]
"""Shape (layers, blocks, heads, tokens of a block, bytes of a token's content)."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A rank's KV. content_bytes: of one token and head, a multiple of 8."""

    layers: int = 4
    blocks: int = 64
    heads: int = 2
    first_head: int = 0
    block_tokens: int = 16
    content_bytes: int = 512

    @property
    def nbytes(self) -> int:
        """Of all blocks and layers."""
        return self.layers * self.blocks * self.heads * self.block_tokens * self.content_bytes

    def content(self, seed: int) -> Kv:
        """What a rank of this seed offers; no two words are equal."""
        return self._shaped(pattern(self.nbytes, seed))

    def allocate(self) -> Kv:
        """Zeroed memory of whole pages."""
        return self._shaped(anonymous(self.nbytes))

    def describe(self, kv: Kv, hold_table_address: int = 0) -> KvMemory:
        """Where it is."""
        return KvMemory(
            hold_table_address=hold_table_address,
            layer_addresses=[layer.ctypes.data for layer in kv],
            block_stride_bytes=kv.strides[1],
            head_stride_bytes=kv.strides[2],
            token_stride_bytes=kv.strides[3],
            content_bytes=self.content_bytes,
            block_tokens=self.block_tokens,
            first_head=self.first_head,
            heads=self.heads,
        )

    def _shaped(self, memory: Kv) -> Kv:
        return memory.reshape(self.layers, self.blocks, self.heads, self.block_tokens, self.content_bytes)


class KvRank:
    """KV memory, a hold table and a transfer thread over both. seed: None leaves the memory zeroed. hold_table: a file
    that the ranks of one worker share; none makes one. The thread starts with `mover.start()`."""

    def __init__(
        self,
        name: str,
        shape: Shape,
        callbacks: Callbacks,
        *,
        seed: int | None = None,
        backend: str = "ucx",
        options: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
        verify: bool = True,
        hold_table: str = "",
    ) -> None:
        self.kv = shape.allocate()
        if seed is not None:
            self.kv[:] = shape.content(seed)
        if hold_table:
            self._table = HoldTable(Path(hold_table))
        else:
            with tempfile.TemporaryDirectory() as folder:
                self._table = HoldTable(Path(folder) / "holds")
        self.holds = Holds(self._table)
        transport = open_transport(backend, name, options=options)
        transport.register(self.kv.ctypes.data, self.kv.nbytes)
        memory = shape.describe(self.kv, self._table.address)
        self.mover = Mover(transport, memory, callbacks, timeout_s=timeout_s, readers=1, verify=verify)


class Offers:
    """Obeys the commands, in the transfer thread."""

    def __init__(self, rank: KvRank) -> None:
        self._rank = rank
        self._source = rank.mover.source
        self._slots: dict[str, int] = {}

    def obey(self, verb: str, handoff_id: str = "", *values: str) -> None:
        """One command."""
        match verb, values:
            case "offer", ():
                slot, generation = self._rank.holds.take()
                self._slots[handoff_id] = slot
                self._source.offer(handoff_id)
                say(event="offered", id=handoff_id, slot=slot, generation=generation)
            case "join", ():
                self._source.offer(handoff_id)
                say(event="joined", id=handoff_id)
            case "announce", (first, blocks):
                self._source.announce(handoff_id, Blocks(int(first), [int(block) for block in blocks.split(",")]))
            case "finish", (blocks, token):
                self._source.finish(handoff_id, int(blocks), int(token))
            case "withdraw", ():
                self._rank.holds.give_back([self._slots.pop(handoff_id)])
                self._source.withdraw(handoff_id, "withdrawn")
                say(event="withdrawn", id=handoff_id)
            case "corrupt", ():
                self._rank.kv[0, int(handoff_id), 0, 0, 0] ^= 0xFF
                say(event="corrupted", id=handoff_id)
            case "read", (name, address, memory, slot, generation, blocks):
                source = KvMemory.FromString(bytes.fromhex(memory))
                part = Part(name, source, slice_between(source, self._rank.mover.memory))
                self._rank.mover.know(name, bytes.fromhex(address))
                reader = self._rank.mover.reader
                reader.expect(Receive(handoff_id, handoff_id, int(slot), int(generation), [part], time.monotonic()))
                reader.begin(handoff_id, Blocks(0, range(int(blocks))))
            case "drop", ():
                self._rank.mover.drop(handoff_id)
                say(event="dropped", id=handoff_id)
            case "cpu", ():
                wakes = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
                say(event="cpu", id="", process_s=time.process_time(), wakes=wakes)
            case _:
                say(event="unknown", id=verb)


def main() -> None:
    """The process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for size in fields(Shape):
        parser.add_argument(f"--{size.name.replace('_', '-')}", type=int, default=size.default)
    parser.add_argument("--name", default="source/1/0")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--backend", default="ucx")
    parser.add_argument("--option", action="append", default=[], help="of UCX, such as TLS=tcp")
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--no-verify", action="store_true", help="send no digests")
    parser.add_argument("--hold-table", default="", help="a file that the ranks of one worker share")
    flags = parser.parse_args()
    rank = KvRank(
        flags.name,
        Shape(**{size.name: getattr(flags, size.name) for size in fields(Shape)}),
        Callbacks(
            lambda handoff_id: say(event="renewed", id=handoff_id),
            lambda handoff_id: say(event="done", id=handoff_id),
            lambda outcome: None,
            lambda error: say(event="fatal", id=str(error)),
        ),
        seed=flags.seed,
        backend=flags.backend,
        options=dict(option.split("=", 1) for option in flags.option),
        timeout_s=flags.timeout_s,
        verify=not flags.no_verify,
        hold_table=flags.hold_table,
    )
    say(address=rank.mover.address.hex(), memory=rank.mover.memory.SerializeToString().hex())
    rank.mover.start()
    offers = Offers(rank)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        rank.mover.call(partial(offers.obey, *line.split()))
    rank.mover.close()


if __name__ == "__main__":
    main()
