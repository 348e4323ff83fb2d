"""Whole hand-offs between two processes over the real transports, every byte compared."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from twostroke.bench.kv_rank import Kv, Shape
from twostroke.bench.kv_ranks import ReaderRank, SourceRank
from twostroke.errors import DeadlineError, WorkerLostError
from twostroke.kv.link import LinkReport

StartRank = Callable[..., SourceRank]
StartReader = Callable[..., ReaderRank]

LANES = {"cma": {"TLS": "cma,tcp"}, "tcp": {"TLS": "tcp"}}
MOST_WAKES_PER_S = 20
THEIRS = [9, 3, 40, 12, 13, 14, 60, 1]
HERE = [5, 50, 8, 9, 33, 2, 0, 21]


def tokens(kv: Kv, blocks: list[int]) -> Kv:
    """Shape (layers, heads, tokens, bytes): these blocks, in the order of the prompt."""
    layers, _, heads, _, content = kv.shape
    return kv[:, blocks].transpose(0, 2, 1, 3, 4).reshape(layers, heads, -1, content)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Looks until it holds."""
    end = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > end:
            raise DeadlineError("the condition never held")
        time.sleep(0.002)


@pytest.mark.parametrize("lanes", LANES)
def test_a_handoff_arrives_chunk_by_chunk(start_rank: StartRank, start_reader: StartReader, lanes: str) -> None:
    """O-08: each chunk while the source still computes the next, and nothing but what was asked for."""
    source, reader = start_rank(options=LANES[lanes]), start_reader(options=LANES[lanes])
    report = reader.probe(source)
    assert isinstance(report, LinkReport)
    assert ("cma/memory" in report.lanes) == (lanes == "cma")
    reader.expect("h", source.offer("h"), source)
    reader.begin("h", HERE)
    for first in range(0, 8, 2):
        source.announce("h", first, THEIRS[first : first + 2])
        here, there = HERE[first : first + 2], THEIRS[first : first + 2]
        wait_until(lambda here=here, there=there: np.array_equal(reader.kv[:, here], source.content[:, there]))  # type: ignore[misc]
    source.tell("finish h 8 77")
    _, outcome = reader.outcome("h")
    assert (outcome.failure, outcome.first_token_id, outcome.missing) == (None, 77, ())
    assert outcome.nbytes == reader.kv[:, HERE].nbytes
    assert np.array_equal(reader.kv[:, HERE], source.content[:, THEIRS])
    assert not np.delete(reader.kv, HERE, axis=1).any()
    assert source.event("renewed")["id"] == "h"
    assert source.event("done")["id"] == "h"


def test_many_handoffs_at_once_do_not_mix(start_rank: StartRank, start_reader: StartReader) -> None:
    source, reader = start_rank(), start_reader()
    for number in range(16):
        reader.expect(f"h{number}", source.offer(f"h{number}"), source)
        reader.begin(f"h{number}", list(range(4 * number, 4 * number + 4)))
    theirs = np.random.default_rng(1).permutation(64).reshape(16, 4).tolist()
    for number in range(16):
        source.announce(f"h{number}", 0, theirs[number][:3])
    for number in reversed(range(16)):
        source.announce(f"h{number}", 3, theirs[number][3:])
        source.tell(f"finish h{number} 4 {number}")
    outcomes = [reader.outcome(f"h{number}")[1] for number in range(16)]
    assert [(outcome.failure, outcome.first_token_id) for outcome in outcomes] == [(None, n) for n in range(16)]
    assert np.array_equal(reader.kv, source.content[:, [block for blocks in theirs for block in blocks]])


@pytest.mark.parametrize(("lanes", "source_tokens", "reader_tokens"), [("cma", 16, 32), ("tcp", 32, 16)])
def test_unequal_block_sizes_are_converted(
    start_rank: StartRank, start_reader: StartReader, lanes: str, source_tokens: int, reader_tokens: int
) -> None:
    """O-06."""
    source = start_rank(shape=Shape(block_tokens=source_tokens), options=LANES[lanes])
    reader = start_reader(shape=Shape(block_tokens=reader_tokens), options=LANES[lanes])
    theirs, here = THEIRS[: 128 // source_tokens], HERE[: 128 // reader_tokens]
    outcome = reader.read(source, "h", theirs, here)
    assert outcome.failure is None
    assert np.array_equal(tokens(reader.kv, here), tokens(source.content, theirs))
    assert not np.delete(reader.kv, here, axis=1).any()


def test_two_source_ranks_fill_one_reader(start_rank: StartRank, start_reader: StartReader, tmp_path: Path) -> None:
    """O-07: two tensor parallel ranks there, one here; and larger blocks there."""
    table = [f"--hold-table={tmp_path / 'holds'}"]
    first = start_rank("p/1/0", Shape(block_tokens=32), flags=table)
    second = start_rank("p/1/1", Shape(block_tokens=32, first_head=2), seed=10**6, flags=table)
    reader = start_reader(shape=Shape(heads=4))
    hold = first.offer("h")
    second.tell("join h")
    reader.expect("h", hold, first, second)
    reader.begin("h", HERE)
    for source in (first, second):
        source.serve("h", THEIRS[:4])
    _, outcome = reader.outcome("h")
    assert outcome.failure is None
    for heads, source in ((slice(0, 2), first), (slice(2, 4), second)):
        assert np.array_equal(tokens(reader.kv[:, :, heads], HERE), tokens(source.content, THEIRS[:4]))
        assert source.event("done")["id"] == "h"


def test_one_source_rank_fills_half_a_reader(start_rank: StartRank, start_reader: StartReader) -> None:
    """O-07: one rank there, the second of two here."""
    source, reader = start_rank(shape=Shape(heads=4)), start_reader(shape=Shape(heads=2, first_head=2))
    outcome = reader.read(source, "h", THEIRS, HERE)
    assert outcome.failure is None
    assert np.array_equal(tokens(reader.kv, HERE), tokens(source.content[:, :, 2:], THEIRS))


def test_a_corrupt_byte_is_never_complete(start_rank: StartRank, start_reader: StartReader) -> None:
    """O-02, O-15: one byte changes between its digest and its read; the next hand-off is well."""
    source, reader = start_rank(), start_reader()
    reader.expect("h", source.offer("h"), source)
    source.serve("h", THEIRS)
    # A second hand-off, served after the first: when it is here, the digests of both were taken.
    assert reader.read(source, "after", [2], [63]).failure is None
    source.tell("corrupt 13")
    source.event("corrupted")
    reader.begin("h", HERE)
    _, outcome = reader.outcome("h")
    assert outcome.corrupt
    assert outcome.failure == "what arrived from p/1/0 is not what it has"
    assert outcome.missing == HERE
    source.tell("withdraw h")
    source.event("withdrawn")
    again = reader.read(source, "again", [1, 2, 3], [4, 5, 6])
    assert (again.failure, again.corrupt) == (None, False)


def test_a_handoff_over_ipv6(start_rank: StartRank, start_reader: StartReader) -> None:
    """O-81: UCX_TCP_AF_PRIO chooses it."""
    options = {"TLS": "tcp", "NET_DEVICES": "lo", "TCP_AF_PRIO": "inet6"}
    source = start_rank(options=options)
    reader = start_reader(options=options)
    assert reader.read(source, "h", THEIRS, HERE).failure is None
    assert np.array_equal(reader.kv[:, HERE], source.content[:, THEIRS])
    own = [connection.laddr.ip for connection in psutil.Process().net_connections("tcp6")]
    theirs = [c.laddr.ip for c in psutil.Process(source.process.pid).net_connections("tcp6") if c.status == "LISTEN"]
    assert "::1" in own
    assert theirs


def test_what_changed_before_its_digest_is_what_the_source_has(
    start_rank: StartRank, start_reader: StartReader
) -> None:
    source, reader = start_rank(), start_reader()
    source.tell("corrupt 13")
    source.event("corrupted")
    assert reader.read(source, "h", THEIRS, HERE).failure is None
    assert np.count_nonzero(reader.kv[:, HERE] != source.content[:, THEIRS]) == 1


def test_a_hold_of_another_generation_is_not_believed(start_rank: StartRank, start_reader: StartReader) -> None:
    """O-03: the word in the source's table is read, one-sided, after the blocks."""
    source, reader = start_rank(), start_reader()
    slot, generation = source.offer("h")
    reader.expect("h", (slot, generation - 1), source)
    reader.begin("h", HERE)
    source.serve("h", THEIRS)
    _, outcome = reader.outcome("h")
    assert outcome.failure == "p/1/0 gave the blocks away while they were being read"
    assert outcome.missing == HERE


def test_a_withdrawn_handoff_ends_at_once(start_rank: StartRank, start_reader: StartReader) -> None:
    """O-25, O-26."""
    source, reader = start_rank(), start_reader()
    reader.expect("h", source.offer("h"), source)
    reader.begin("h", HERE)
    source.announce("h", 0, THEIRS[:4])
    source.event("renewed")
    source.tell("withdraw h")
    _, outcome = reader.outcome("h")
    assert outcome.failure == "p/1/0 gave it up: withdrawn"
    assert outcome.missing == HERE


def test_a_restarted_peer_with_other_memory_works_at_once(start_rank: StartRank, start_reader: StartReader) -> None:
    """O-79: same worker, next epoch, another layout of memory; nothing of the old one is used."""
    reader = start_reader()
    for epoch, block_tokens in ((1, 16), (2, 32)):
        source = start_rank(f"p/{epoch}/0", Shape(block_tokens=block_tokens), seed=epoch * 10**6)
        theirs = THEIRS[: 128 // block_tokens]
        reader.kv[:] = 0
        start = time.monotonic()
        outcome = reader.read(source, f"h{epoch}", theirs, HERE)
        assert outcome.failure is None
        assert np.array_equal(tokens(reader.kv, HERE), tokens(source.content, theirs))
        # Well below the deadline of 5 s that waiting for the old one would cost.
        assert time.monotonic() - start < 4.0
        source.end()


def test_dropping_a_peer_ends_what_waits_for_it_and_nothing_else(
    start_rank: StartRank, start_reader: StartReader
) -> None:
    """O-79: the router says that a worker's epoch has ended."""
    old, other, reader = start_rank("p/1/0"), start_rank("q/1/0"), start_reader()
    reader.expect("old", old.offer("old"), old)
    reader.expect("other", other.offer("other"), other)
    for handoff_id, source, here in (("old", old, HERE), ("other", other, [10, 11])):
        reader.begin(handoff_id, here)
        source.event("renewed", handoff_id)
    reader.mover.call(lambda: reader.mover.drop("p/1/"))
    _, outcome = reader.outcome("old", 4.0)
    assert outcome.failure == "p/1/0 has ended"
    other.serve("other", [3, 4])
    assert reader.outcome("other")[1].failure is None
    reader.mover.call(lambda: reader.mover.drop("nobody/"))
    # Its address was forgotten too: only who names it anew reaches it.
    assert reader.read(old, "again", [3, 4], [10, 11]).failure is None


def test_a_source_drops_a_reader_and_serves_it_when_it_greets_again(
    start_rank: StartRank, start_reader: StartReader
) -> None:
    source = start_rank()
    reader = start_reader()
    assert reader.read(source, "h1", THEIRS, HERE).failure is None
    source.tell("drop d/1/")
    source.event("dropped")
    again = start_reader("d/2/0")
    assert again.read(source, "h2", THEIRS, HERE).failure is None
    assert np.array_equal(again.kv[:, HERE], source.content[:, THEIRS])


def test_links_are_probed_one_after_the_other_and_a_dead_one_fails_alone(
    start_rank: StartRank, start_reader: StartReader
) -> None:
    """O-77, O-80."""
    dead, living, reader = start_rank("p/1/0"), start_rank("q/1/0"), start_reader(timeout_s=3.0)
    assert dead.address
    dead.end()
    assert isinstance(reader.probe(dead), WorkerLostError)
    reports = [reader.probe(living) for _ in range(3)]
    assert all(isinstance(report, LinkReport) and report.bytes_per_s > 0 for report in reports)


def test_an_idle_pair_sleeps(start_rank: StartRank, start_reader: StartReader) -> None:
    """It wakes up a few times a second, for tens of microseconds each. Its time says little on a busy machine, but that
    it does not spin."""
    source, reader = start_rank(), start_reader()
    assert reader.read(source, "h", THEIRS, HERE).failure is None

    def used() -> tuple[float, int]:
        source.tell("cpu")
        told = source.event("cpu")
        return float(told["process_s"]), int(told["wakes"])

    (before_s, before), start = used(), time.monotonic()
    with pytest.raises(DeadlineError):
        source.event("nothing happens", timeout_s=2.0)
    (after_s, after), took_s = used(), time.monotonic() - start
    assert (after - before) / took_s < MOST_WAKES_PER_S
    assert (after_s - before_s) / took_s < 0.2


def test_the_nixl_transport_moves_a_handoff(start_rank: StartRank, start_reader: StartReader) -> None:
    pytest.importorskip("nixl_cu12")
    source, reader = start_rank(flags=["--backend=nixl"]), start_reader(backend="nixl")
    for number in range(2):
        outcome = reader.read(source, f"h{number}", THEIRS, HERE)
        assert outcome.failure is None
        assert np.array_equal(reader.kv[:, HERE], source.content[:, THEIRS])
        assert source.event("done")["id"] == f"h{number}"
        reader.kv[:] = 0
