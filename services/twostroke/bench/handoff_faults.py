"""Faults in the middle of a hand-off: what they cost, and whether anything lands late.

A round: two sources, one reader here. The reader fetches a large hand-off from the first source; when its first bytes
are here the fault strikes: the source is killed or stopped, or the network path to it is cut. Until the hand-off has
ended, the reader goes on fetching others from the second source. Then its memory is filled with one value, the fault is
healed where it can be, and every byte is compared a while later; the source gives its blocks back, and serves again. In
one more fault it is the reader that is killed; the source must live, give its blocks back and serve the next reader.

Each round runs in a process of its own, `python -m twostroke.bench.handoff_faults FAULT LANES`, which prints the result
as JSON: UCX knows only the network routes that there were when it was loaded.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import numpy as np

from twostroke.bench.kv_rank import Shape
from twostroke.bench.kv_ranks import ReaderRank, SourceRank
from twostroke.bench.network_path import NetworkPath
from twostroke.bench.record import Record
from twostroke.config import child_environment
from twostroke.errors import TwostrokeError, UnavailableError
from twostroke.kv.receive import Outcome

SHAPE = Shape(blocks=256, content_bytes=2048)
"""64 MiB: still under way when the fault strikes."""
OTHER_SHAPE = Shape(blocks=16, content_bytes=2048)
READER_SHAPE = Shape(blocks=272, content_bytes=2048)
"""The blocks after the first 256 are for the second source."""
BESIDE = range(256, 272)
FILL = 0xA5
SETTLE_S = {"kill": 0.5, "stop": 1.0, "cut": 4.0}
"""After the fault is healed. TCP tries again ever less often, here every 3 s by then."""
_TCP, _CMA = {"TLS": "tcp"}, {"TLS": "cma,tcp"}
CASES: tuple[tuple[str, str], ...] = (
    ("kill", "cma"),
    ("kill", "tcp"),
    ("stop", "cma"),
    ("stop", "tcp"),
    ("cut", "tcp"),
    ("kill reader", "cma"),
    ("kill reader", "tcp"),
)
ROUNDS = 3
TIMEOUT_S = 2.0
ALLOWED_S = 1.0
RELEASE_S = 5.0


@dataclass(slots=True)
class Round:
    """What one round brought. None: not asked in this fault."""

    fault: str
    lanes: str
    deadline_s: float
    error_s: float | None = None
    """From the fault to the failed outcome."""
    failure: str | None = None
    landed_percent: float | None = None
    """Of the hand-off, when the fault struck."""
    late_bytes: int | None = None
    beside: int = 0
    """Hand-offs from the second source until the outcome."""
    beside_right: int = 0
    released_s: float | None = None
    """From the order to give the blocks back, or the end of the fault, until it was done."""
    serves_again: bool | None = None


def run_round(fault: str, lanes: str, timeout_s: float = TIMEOUT_S) -> Round:
    """One round of a case, in a process of its own. timeout_s: the deadline of hand-offs.

    Raises UnavailableError, with the reason, where this host does not allow the fault or the round breaks off.
    """
    command = [sys.executable, "-m", "twostroke.bench.handoff_faults", fault, lanes, f"--timeout-s={timeout_s}"]
    child = subprocess.run(command, capture_output=True, text=True, env=child_environment(), check=False)
    last = child.stdout.strip().splitlines()[-1:] or [""]
    if child.returncode != 0 or not last[0].startswith("{"):
        raise UnavailableError(last[0] or child.stderr.strip()[-300:] or f"the round ended with {child.returncode}")
    return Round(**json.loads(last[0]))


def _round(fault: str, lanes: str, timeout_s: float) -> Round:
    with ExitStack() as stack:
        options: Mapping[str, str] = _TCP if lanes == "tcp" else _CMA
        if fault == "kill reader":
            return _reader_killed(stack, lanes, options, timeout_s)
        path = None
        theirs: Mapping[str, str] = options
        prefix: Sequence[str] = ()
        if fault == "cut":
            path = NetworkPath()
            stack.callback(path.remove)
            options = {**_TCP, "NET_DEVICES": path.device}
            theirs, prefix = {**options, "NET_DEVICES": path.inner}, path.inside
        victim = _source(stack, "p/1/0", SHAPE, theirs, prefix)
        other = _source(stack, "q/1/0", OTHER_SHAPE, options)
        reader = ReaderRank("d/1/0", READER_SHAPE, options=options, timeout_s=timeout_s)
        stack.callback(reader.close)
        strike, heal = _fault(fault, victim, path)
        return _strike(Round(fault, lanes, timeout_s), reader, victim, other, strike, heal)


def _source(
    stack: ExitStack, name: str, shape: Shape, options: Mapping[str, str], prefix: Sequence[str] = ()
) -> SourceRank:
    source = SourceRank(name, shape, options=options, prefix=prefix, seed=1 if shape is SHAPE else 10**9)
    stack.callback(source.end)
    return source


def _fault(fault: str, victim: SourceRank, path: NetworkPath | None) -> tuple[Callable[[], None], Callable[[], None]]:
    if path is not None:
        return path.cut, path.heal
    if fault == "kill":
        return (lambda: victim.signal(signal.SIGKILL)), lambda: None
    return (lambda: victim.signal(signal.SIGSTOP)), lambda: victim.signal(signal.SIGCONT)


def _strike(
    result: Round,
    reader: ReaderRank,
    victim: SourceRank,
    other: SourceRank,
    strike: Callable[[], None],
    heal: Callable[[], None],
) -> Round:
    target = reader.kv[:, : SHAPE.blocks]
    _beside(reader, other, "warm")
    reader.expect("h", victim.offer("h"), victim)
    reader.begin("h", np.random.default_rng(1).permutation(SHAPE.blocks).tolist())
    victim.event("renewed", "h")
    victim.announce("h", 0, range(SHAPE.blocks))
    _wait_for_bytes(reader)
    strike()
    struck_s = time.monotonic()
    result.landed_percent = 100 * float(np.count_nonzero(target[:, :, :, :, 8])) / target[:, :, :, :, 8].size
    while (ended := _ended(reader)) is None:
        result.beside += 1
        result.beside_right += _beside(reader, other, f"beside-{result.beside}")
    ended_s, outcome = ended
    result.error_s, result.failure = ended_s - struck_s, outcome.failure
    target[:] = FILL
    heal()
    _keep_serving(reader, other, SETTLE_S[result.fault])
    result.late_bytes = int(np.count_nonzero(target != FILL))
    if victim.alive():
        start_s = time.monotonic()
        victim.tell("withdraw h")
        victim.event("withdrawn", "h")
        result.released_s = time.monotonic() - start_s
        again = reader.read(victim, "again", range(16), range(16))
        result.serves_again = again.failure is None and np.array_equal(reader.kv[:, :16], victim.content[:, :16])
    return result


def _wait_for_bytes(reader: ReaderRank, timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not reader.kv[:, : SHAPE.blocks, 0, 0, :16].any():
        if time.monotonic() > end_s:
            raise UnavailableError("the transfer never began")


def _ended(reader: ReaderRank) -> tuple[float, Outcome] | None:
    try:
        return reader.outcome("h", 0.0)
    except TwostrokeError:
        return None


def _beside(reader: ReaderRank, other: SourceRank, handoff_id: str) -> bool:
    """A hand-off from the second source, right or not."""
    reader.kv[:, BESIDE.start : BESIDE.stop] = 0
    outcome = reader.read(other, handoff_id, range(len(BESIDE)), BESIDE)
    other.tell(f"withdraw {handoff_id}")
    here, there = reader.kv[:, BESIDE.start : BESIDE.stop], other.content[:, : len(BESIDE)]
    return outcome.failure is None and np.array_equal(here, there)


def _keep_serving(reader: ReaderRank, other: SourceRank, duration_s: float) -> None:
    end_s = time.monotonic() + duration_s
    while time.monotonic() < end_s:
        _beside(reader, other, "settling")


def _reader_killed(stack: ExitStack, lanes: str, options: Mapping[str, str], timeout_s: float) -> Round:
    """The reader dies in the middle; the source must live, give the blocks back and serve the next reader."""
    result = Round("kill reader", lanes, timeout_s)
    source = _source(stack, "p/1/0", SHAPE, options)
    victim = _source(stack, "d/1/0", SHAPE, options)
    slot, generation = source.offer("h")
    where = f"{source.name} {source.address.hex()} {source.memory.SerializeToString().hex()}"
    victim.tell(f"read h {where} {slot} {generation} {SHAPE.blocks}")
    source.event("renewed", "h")
    source.announce("h", 0, range(SHAPE.blocks))
    time.sleep(np.random.default_rng().uniform(0.0, 0.05))  # a random moment of the transfer
    victim.signal(signal.SIGKILL)
    source.tell("withdraw h")
    start_s = time.monotonic()
    source.event("withdrawn", "h")
    result.released_s = time.monotonic() - start_s
    reader = ReaderRank("d/2/0", READER_SHAPE, options=options, timeout_s=timeout_s)
    stack.callback(reader.close)
    result.beside = 1
    result.beside_right = int(_beside(reader, source, "next"))
    result.serves_again = bool(result.beside_right)
    return result


def faults(record: Record, rounds: int = ROUNDS) -> None:
    """Runs all cases and adds their rows and checks. A case that this host does not allow fails its checks."""
    results: dict[tuple[str, str], list[Round]] = {}
    for fault, lanes in CASES:
        for _ in range(rounds):
            try:
                result = run_round(fault, lanes)
            except TwostrokeError as error:
                record.row(fault=fault, lanes=lanes, failure=error.message)
                continue
            results.setdefault((fault, lanes), []).append(result)
            record.row(**asdict(result))
    for fault, lanes in CASES:
        _check(record, f"{fault}, {lanes}", results.get((fault, lanes), []), rounds)


def _check(record: Record, case: str, results: list[Round], rounds: int) -> None:
    whole = len(results) == rounds
    if not case.startswith("kill reader"):
        errors = [result.error_s for result in results if result.error_s is not None and result.failure]
        late = [result.late_bytes for result in results if result.late_bytes is not None]
        slowest, goal_s = max(errors, default=None), TIMEOUT_S + ALLOWED_S
        record.check(
            f"error within the set deadline plus 1 s ({case})",
            slowest,
            "s",
            f"<= {goal_s:g}",
            len(errors) == rounds and slowest is not None and slowest <= goal_s,
        )
        landed = float(sum(late)) if late else None
        record.check(f"no byte lands late ({case})", landed, "bytes", "0", whole and landed == 0)
    beside = sum(result.beside for result in results)
    right = sum(result.beside_right for result in results)
    share = 100 * right / beside if beside else None
    record.check(f"survivor keeps serving ({case})", share, "%", "100", whole and share == 100)
    if case.startswith(("stop", "cut", "kill reader")):
        released = [result.released_s for result in results if result.released_s is not None and result.serves_again]
        slowest = max(released, default=None)
        record.check(
            f"no block stays held after 5 s ({case})",
            slowest,
            "s",
            f"<= {RELEASE_S:g}",
            len(released) == rounds and slowest is not None and slowest <= RELEASE_S,
        )


def main() -> int:
    """One round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fault", choices=sorted({fault for fault, _ in CASES}))
    parser.add_argument("lanes", choices=sorted({lanes for _, lanes in CASES}))
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    flags = parser.parse_args()
    try:
        result = _round(flags.fault, flags.lanes, flags.timeout_s)
    except TwostrokeError as error:
        sys.stdout.write(f"{error.message}\n")
        return 1
    sys.stdout.write(json.dumps(asdict(result)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
