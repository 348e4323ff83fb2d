"""What does it cost to pull scattered blocks from another process? `python -m twostroke.bench.pull`; writes
build/bench/pull.json.

Five ways, interleaved repetition by repetition, medians: our UCX transport; NIXL as vLLM's connector runs it, with its
progress thread; NIXL without that thread; `process_vm_readv` with 512 pieces a call; and a memcpy loop over blocks of
one process as the floor. Each way reads in a process of its own, which is stopped (SIGSTOP) while it is another's turn.
All read from and into the same two pools of shared memory, since the place of its pages makes one process twice as fast
as another. CPU time is that process's, all threads, from the post to the end of the pull; over cma the source has no
part.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from rich.console import Console

from twostroke.bench.kv_pair import KvPair
from twostroke.bench.kv_source import Bytes
from twostroke.bench.record import Record
from twostroke.config import child_environment
from twostroke.errors import EngineError, UnavailableError
from twostroke.kv.transport import Rows, TicketDone
from twostroke.kv.ucx import native

KIB = 1024
SHAPES = ((16 * KIB, 2048), (64 * KIB, 768), (640 * KIB, 80))
"""Block bytes and blocks per pull, out of a pool twice the size."""
IDLE = len(SHAPES)
"""Stands for waiting IDLE_S for something to happen."""
IDLE_S, IDLE_WINDOWS = 2.0, 3
POOL_BYTES = 104 << 20
OURS, NIXL, QUIET_NIXL, READV, MEMCPY = "ours", "nixl", "nixl, no thread", "process_vm_readv", "memcpy loop"
WAYS = (OURS, NIXL, QUIET_NIXL, READV, MEMCPY)


class _Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("nbytes", ctypes.c_size_t))


def pull(pair: KvPair, rows: Rows) -> None:
    """One batch, to its end."""
    assert pair.peer is not None
    done = pair.outcome(pair.transport.get_batch(pair.peer, rows, 60.0))
    if not isinstance(done, TicketDone):
        raise EngineError(f"the pull failed: {done.message}")


def vm_readv(pid: int, rows: Rows) -> Callable[[], None]:
    """The system call that cma uses, its tables made beforehand as a C program would have them."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    calls = []
    for part in np.array_split(rows, -(-len(rows) // 512)):
        here, there = (
            (_Piece * len(part))(*(_Piece(int(row[column]), int(row[2])) for row in part)) for column in (0, 1)
        )
        calls.append((here, there, ctypes.c_ulong(len(part)), int(part[:, 2].sum())))

    def run() -> None:
        for here, there, size, nbytes in calls:
            if libc.process_vm_readv(pid, here, size, there, size, ctypes.c_ulong(0)) != nbytes:
                raise EngineError(f"process_vm_readv failed with errno {ctypes.get_errno()}")

    return run


def memcpy(pair: KvPair, origin: Bytes, rows: Rows) -> Callable[[], None]:
    """A loop of memcpy from this process's mapping of the source's pool."""
    copied = rows.copy()
    copied[:, 1] += origin.ctypes.data - pair.base
    copy = native().copy
    return lambda: copy(copied)


def prepare(way: str, pair: KvPair, origin: Bytes, block: int, count: int) -> Callable[[], None]:
    """One repetition of a way and shape; its bytes are verified once. Raises EngineError when they are wrong."""
    rows = pair.rows(block, count, np.random.default_rng(block))
    run = {READV: vm_readv(pair.source.pid, rows), MEMCPY: memcpy(pair, origin, rows)}.get(
        way, lambda: pull(pair, rows)
    )
    pair.memory[:] = 0
    run()
    if not pair.right(rows):
        raise EngineError(f"{way} brought wrong bytes")
    return run


def reader(way: str, descriptors: tuple[int, int]) -> None:
    """The process of one way: answers a line `SHAPE` with one repetition's times."""
    backend = "nixl" if way in (NIXL, QUIET_NIXL) else "ucx"
    pair = KvPair(backend, POOL_BYTES, {}, progress_thread=way == NIXL, descriptors=descriptors)
    try:
        peer = pair.connect()
        origin = np.frombuffer(mmap.mmap(descriptors[1], POOL_BYTES, prot=mmap.PROT_READ), dtype=np.uint8)
        runs: list[Callable[[], object]] = [prepare(way, pair, origin, block, count) for block, count in SHAPES]
        runs.append(partial(pair.transport.poll, IDLE_S))
        print(json.dumps({"lanes": list(pair.transport.lanes(peer))}), flush=True)  # noqa: T201
        for line in sys.stdin:
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            runs[int(line)]()
            wall_s = time.perf_counter() - wall_s
            print(json.dumps({"wall_s": wall_s, "cpu_s": time.process_time() - cpu_s}), flush=True)  # noqa: T201
    finally:
        pair.close()


@dataclass(slots=True)
class Reader:
    """The parent's end of one way, with the times of each shape."""

    way: str
    process: subprocess.Popen[str]
    lanes: str = ""
    wall_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(IDLE + 1)])
    cpu_s: list[list[float]] = field(default_factory=lambda: [[] for _ in range(IDLE + 1)])

    @classmethod
    def start(cls, way: str, descriptors: tuple[int, int]) -> Reader:
        """Raises UnavailableError when the way cannot be run here."""
        process = subprocess.Popen(
            [sys.executable, "-m", "twostroke.bench.pull", "--reader", way, "--descriptors", *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        result = cls(way, process)
        try:
            lanes = result._line()["lanes"]
            assert isinstance(lanes, list)
            result.lanes = " ".join(lanes)
        except UnavailableError:
            process.kill()
            process.communicate()
            raise
        process.send_signal(signal.SIGSTOP)
        return result

    def _line(self) -> dict[str, object]:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith("{"):
                found: dict[str, object] = json.loads(text)
                return found
        raise UnavailableError(f"the reader of {self.way!r} ended; its message is above")

    def repeat(self, shape: int) -> None:
        """One repetition."""
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{shape}\n")
        self.process.stdin.flush()
        times = self._line()
        self.process.send_signal(signal.SIGSTOP)
        self.wall_s[shape].append(float(str(times["wall_s"])))
        self.cpu_s[shape].append(float(str(times["cpu_s"])))

    def end(self) -> None:
        """Lets it close its source."""
        self.process.send_signal(signal.SIGCONT)
        self.process.communicate()


def report(record: Record, readers: dict[str, Reader]) -> None:
    """Rows and checks."""
    for shape, (block, count) in enumerate(SHAPES):
        wall = {way: float(np.median(one.wall_s[shape])) for way, one in readers.items()}
        cpu = {way: 1e6 * float(np.median(one.cpu_s[shape])) / count for way, one in readers.items()}
        for way, one in readers.items():
            record.row(
                block_kib=block // KIB,
                way=way,
                cpu_us_per_block=cpu[way],
                gb_s=block * count / wall[way] / 1e9,
                rate_of_memcpy=wall[MEMCPY] / wall[way],
                lanes=one.lanes if way == OURS else "",
            )
        share = cpu[OURS] / cpu[NIXL] if NIXL in cpu else None
        name = f"CPU per block of {block // KIB} KiB, ours / NIXL's"
        record.check(name, share, "", "<= 0.6", share is not None and share <= 0.6)
        if block == 64 * KIB:
            rate = wall[MEMCPY] / wall[OURS] if "cma" in readers[OURS].lanes else None
            name = "rate at 64 KiB over cma, ours / memcpy loop's"
            record.check(name, rate, "", ">= 0.5", rate is not None and rate >= 0.5)
    ours = readers[OURS]
    idle = 100 * float(np.median(np.divide(ours.cpu_s[IDLE], ours.wall_s[IDLE])))
    record.check("CPU of a reader with nothing to do, ours", idle, "% of a core", "< 1", idle < 1)


def run(repetitions: int, command: str) -> Record:
    """The whole benchmark. A way that cannot be run is left out, and its checks are not ok."""
    record = Record("pull", command)
    readers: dict[str, Reader] = {}
    here, there = (os.memfd_create(name) for name in ("reader", "source"))
    try:
        for descriptor in (here, there):
            os.ftruncate(descriptor, POOL_BYTES)
        for way in WAYS:
            try:
                readers[way] = Reader.start(way, (here, there))
            except UnavailableError as error:
                if way in (OURS, MEMCPY):
                    raise
                record.row(way=way, note=str(error))
        random = np.random.default_rng(1)
        for shape in range(len(SHAPES)):
            for _ in range(repetitions):
                for way in random.permutation(list(readers)):
                    readers[way].repeat(shape)
        for _ in range(IDLE_WINDOWS):
            readers[OURS].repeat(IDLE)
    finally:
        for one in readers.values():
            one.end()
        os.close(here)
        os.close(there)
    report(record, readers)
    return record


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=25)
    parser.add_argument("--reader", default="", help=argparse.SUPPRESS)
    parser.add_argument("--descriptors", type=int, nargs=2, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.reader:
        reader(flags.reader, tuple(flags.descriptors))
        return 0
    record = run(flags.repetitions, f"python -m twostroke.bench.pull --repetitions {flags.repetitions}")
    console = Console()
    record.print(console)
    console.print(f"written to {record.write()}")
    return 0 if record.ok else 1


if __name__ == "__main__":
    sys.exit(main())
