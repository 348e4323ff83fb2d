"""Does a byte land after a fence? `python -m twostroke.bench.soak_fence`; writes build/bench/soak_fence.json.

A round: start a read of scattered blocks, stop the source (SIGSTOP) at a random moment, let the deadline pass, fence,
fill all memory with one value, resume the source (SIGCONT), go on polling for a settle time, and compare every byte.
Over cma the source has no part, so there the deadline itself falls at a random moment. Each set of lanes runs in a
process of its own, since UCX settings of NIXL are the process's.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import numpy as np
from rich.console import Console

from twostroke.bench.kv_pair import KvPair
from twostroke.bench.record import Record
from twostroke.config import child_environment
from twostroke.errors import TwostrokeError
from twostroke.kv.transport import TicketFailed

BLOCK = 64 << 10
NBYTES = 32 << 20
FILL = 0xA5
WAIT_S = 0.25
SETTLE_S = 0.4
_SHM = {"POSIX_ERROR_HANDLING": "y", "SYSV_ERROR_HANDLING": "y"}
LANES = {"tcp": {"TLS": "tcp"}, "cma": {"TLS": "cma,tcp"}, "shm": {"TLS": "posix,sysv", **_SHM}}
ROUNDS = {("ucx", "tcp"): 100, ("ucx", "cma"): 60, ("ucx", "shm"): 40, ("nixl", "tcp"): 10, ("nixl", "cma"): 10}


@dataclass(slots=True)
class Tally:
    """What the rounds of one lane set brought. Late bytes: outside and inside of the memory that the fence named."""

    backend: str
    lanes: str
    rounds: int = 0
    given_up: int = 0
    landed_percent: float = 0.0
    fence_ms_max: float = 0.0
    rounds_late: int = 0
    late_bytes: int = 0
    late_quarantined_bytes: int = 0
    source_died: int = 0


def one_round(pair: KvPair, lanes: str, full_s: float, random: np.random.Generator, tally: Tally) -> None:
    """Adds one round to the tally."""
    peer = pair.connect()
    count = NBYTES // BLOCK
    pair.memory[:] = 0
    rows = np.concatenate([pair.rows(BLOCK, count, random) for _ in range(2)])
    moment = random.uniform(0.0, 0.8 * full_s)
    try:
        ticket = pair.transport.get_batch(peer, rows, moment if lanes == "cma" else moment + WAIT_S)
        early = []
        if lanes != "cma":
            early = pair.transport.poll(moment)
            pair.source.send_signal(signal.SIGSTOP)
        outcome = pair.outcome(ticket, early)
        landed = np.count_nonzero(pair.memory.reshape(-1, BLOCK)[:, 8])
        start = time.perf_counter()
        quarantine = pair.transport.fence(peer)
        tally.fence_ms_max = max(tally.fence_ms_max, 1000 * (time.perf_counter() - start))
        pair.memory[:] = FILL
    finally:
        pair.source.send_signal(signal.SIGCONT)
    end = time.monotonic() + SETTLE_S
    while (left := end - time.monotonic()) > 0:
        pair.transport.poll(left)
    changed = np.flatnonzero(pair.memory != FILL)
    named = np.zeros(NBYTES, dtype=bool)
    for address, nbytes in quarantine.ranges:
        named[address - pair.memory.ctypes.data :][:nbytes] = True
    inside = int(named[changed].sum())
    tally.rounds += 1
    tally.given_up += isinstance(outcome, TicketFailed)
    tally.landed_percent += 100 * landed / count
    tally.rounds_late += len(changed) > 0
    tally.late_bytes += len(changed) - inside
    tally.late_quarantined_bytes += inside


def full_transfer_s(pair: KvPair) -> float:
    """How long the read of a round takes undisturbed."""
    peer = pair.connect()
    random = np.random.default_rng(1)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        rows = np.concatenate([pair.rows(BLOCK, NBYTES // BLOCK, random) for _ in range(2)])
        pair.outcome(pair.transport.get_batch(peer, rows, 60.0))
        times.append(time.perf_counter() - start)
    pair.transport.fence(peer)
    return min(times)


def soak(backend: str, lanes: str, rounds: int, seed: int) -> Tally:
    """All rounds over one set of lanes."""
    random = np.random.default_rng(seed)
    tally = Tally(backend, lanes)
    pair = KvPair(backend, NBYTES, LANES[lanes])
    try:
        full_s = full_transfer_s(pair)
        while tally.rounds < rounds:
            if not pair.alive():
                tally.source_died += 1
                pair.start_source()
            try:
                one_round(pair, lanes, full_s, random, tally)
            except TwostrokeError:
                tally.rounds += 1
                pair.close()
                tally.source_died += 1
                pair = KvPair(backend, NBYTES, LANES[lanes])
    finally:
        pair.close()
    tally.landed_percent /= max(1, tally.rounds)
    return tally


def run_all(lanes: list[tuple[str, str]], scale: float, seed: int) -> Iterator[Tally]:
    """Runs each set of lanes in its own process."""
    for backend, name in lanes:
        rounds = max(1, round(scale * ROUNDS[backend, name]))
        command = [sys.executable, "-m", "twostroke.bench.soak_fence", "--child", f"{backend}/{name}"]
        result = subprocess.run(
            [*command, "--rounds", str(rounds), "--seed", str(seed)],
            stdout=subprocess.PIPE,
            text=True,
            env=child_environment(),
            check=False,
        )
        last = result.stdout.strip().splitlines()[-1:] or [""]
        if result.returncode == 0 and last[0].startswith("{"):
            yield Tally(**json.loads(last[0]))


def record(tallies: list[Tally], wanted: list[tuple[str, str]], command: str) -> Record:
    """The record with its checks; a set of lanes that brought no tally fails its check."""
    result = Record("soak_fence", command)
    for tally in tallies:
        result.row(**asdict(tally))
    for backend, name in wanted:
        found = [tally for tally in tallies if (tally.backend, tally.lanes) == (backend, name)]
        late = float(found[0].late_bytes) if found else None
        result.check(f"late bytes outside quarantine, {backend} over {name}", late, "bytes", "0", late == 0)
        if backend == "ucx":
            held = float(found[0].late_quarantined_bytes) if found else None
            died = float(found[0].source_died) if found else None
            result.check(f"late bytes in quarantine, {backend} over {name}", held, "bytes", "0", held == 0)
            result.check(f"sources that died, {backend} over {name}", died, "", "0", died == 0)
    return result


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lanes", nargs="*", default=["/".join(key) for key in ROUNDS], help="such as ucx/tcp")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of rounds")
    parser.add_argument("--rounds", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    flags = parser.parse_args()
    if flags.child:
        backend, name = flags.child.split("/")
        sys.stdout.write("\n" + json.dumps(asdict(soak(backend, name, flags.rounds, flags.seed))) + "\n")
        return 0
    wanted = [(backend, name) for backend, _, name in (text.partition("/") for text in flags.lanes)]
    unknown = [f"{backend}/{name}" for backend, name in wanted if (backend, name) not in ROUNDS]
    if unknown:
        parser.error(f"no lanes {', '.join(unknown)}; choose from {', '.join('/'.join(key) for key in ROUNDS)}")
    tallies = list(run_all(wanted, flags.scale, flags.seed))
    result = record(tallies, wanted, f"python -m twostroke.bench.soak_fence --scale {flags.scale:g}")
    console = Console()
    result.print(console)
    console.print(f"written to {result.write()}")
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
