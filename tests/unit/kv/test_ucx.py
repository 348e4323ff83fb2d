"""The UCX transport between two processes: right bytes, over every kind of lane, and an end to every transfer."""

import mmap
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    LayoutMismatchError,
    UnavailableError,
    WorkerLostError,
)
from twostroke.kv.transport import (
    MAX_SIGNAL_BYTES,
    Event,
    Failure,
    PeerLost,
    SignalReceived,
    TicketDone,
    TicketFailed,
    Transport,
    is_rdma,
)
from twostroke.kv.ucx import OLDEST_VERSION, UcxTransport, find_library, library_candidates
from unit.kv.kv_process import Destination, SourceProcess, connected, outcome, until, wait_for

StartSource = Callable[..., SourceProcess]
StartTransport = Callable[..., Transport]

MIB = 1 << 20
SHM = {"POSIX_ERROR_HANDLING": "y", "SYSV_ERROR_HANDLING": "y"}
LANES = {
    "default": {},
    "cma": {"TLS": "cma,tcp"},
    "tcp": {"TLS": "tcp"},
    "posix": {"TLS": "posix", **SHM},
    "sysv": {"TLS": "sysv", **SHM},
}


@pytest.mark.parametrize("lanes", LANES)
def test_scattered_blocks_arrive(start_source: StartSource, start_transport: StartTransport, lanes: str) -> None:
    source, transport = start_source(8 * MIB, **LANES[lanes]), start_transport(**LANES[lanes])
    destination = Destination(transport, 8 * MIB)
    peer = connected(transport, source)
    for block in (4096, 65536, MIB, 8 * MIB):
        destination.memory[:] = 0
        rows = destination.rows(source, block)
        ticket = transport.get_batch(peer, rows, 30.0)
        assert ticket.nbytes == 8 * MIB
        assert outcome(transport, ticket) == TicketDone(ticket)
        assert destination.right(source, rows)
    rows = destination.rows(source, 8)[:3000]
    ticket = transport.get_batch(peer, rows, 30.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    assert destination.right(source, rows)
    used = {lane.split("/")[0] for lane in transport.lanes(peer)}
    assert used <= {"tcp", "cma", "posix", "sysv"}
    assert lanes == "default" or lanes in used
    assert not is_rdma(transport.lanes(peer))


def test_ten_thousand_rows_in_one_batch(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(10_000 * 4096), start_transport()
    destination = Destination(transport, 10_000 * 4096)
    peer = connected(transport, source)
    rows = destination.rows(source, 4096)
    ticket = transport.get_batch(peer, rows, 30.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    assert destination.right(source, rows)


@pytest.mark.parametrize("lanes", ["default", "tcp"])
def test_rows_run_over_regions_that_touch(
    start_source: StartSource, start_transport: StartTransport, lanes: str
) -> None:
    source, transport = start_source(4 * MIB, regions=8, **LANES[lanes]), start_transport(**LANES[lanes])
    destination = Destination(transport, 4 * MIB, regions=4)
    peer = connected(transport, source)
    rows = np.array([[destination.memory.ctypes.data, source.base, 4 * MIB]], dtype=np.int64)
    ticket = transport.get_batch(peer, rows, 30.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    assert destination.right(source, rows)


def test_rows_outside_registered_memory_are_refused(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB), start_transport()
    destination = Destination(transport, MIB)
    peer = connected(transport, source)
    here, there = destination.memory.ctypes.data, source.base
    for row in ([here - 8, there, 16], [here, there + MIB - 8, 16], [here, there, 0], [here, there, -1], [0, 0, 8]):
        with pytest.raises(ValueError, match="row 1"):
            transport.get_batch(peer, np.array([[here, there, 8], row], dtype=np.int64), 5.0)
    assert not destination.memory.any()
    with pytest.raises(ValueError, match="shape"):
        transport.get_batch(peer, np.zeros((2, 2), dtype=np.int64), 5.0)


@pytest.mark.parametrize("deadline_s", [0.0, -5.0])
def test_an_expired_deadline_fails_at_once(
    start_source: StartSource, start_transport: StartTransport, deadline_s: float
) -> None:
    source, transport = start_source(MIB), start_transport()
    destination = Destination(transport, MIB)
    peer = connected(transport, source)
    ticket = transport.get_batch(peer, destination.rows(source, 4096), deadline_s)
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    assert failed.failure is Failure.DEADLINE
    assert isinstance(failed.error(), DeadlineError)
    assert not transport.fence(peer)
    assert not destination.memory.any()


def test_an_empty_batch_is_done(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB), start_transport()
    peer = connected(transport, source)
    ticket = transport.get_batch(peer, np.zeros((0, 3), dtype=np.int64), 5.0)
    assert outcome(transport, ticket) == TicketDone(ticket)


def test_batches_of_one_peer_end_in_order(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(4 * MIB), start_transport()
    destination = Destination(transport, 4 * MIB)
    peer = connected(transport, source)
    rows = destination.rows(source, 4096)
    tickets = [transport.get_batch(peer, part, 30.0) for part in np.array_split(rows, 20)]
    done: list[Event] = []
    until(lambda: len(done) == 20, PollInto(transport, done))
    assert [event.ticket for event in done if isinstance(event, TicketDone)] == tickets
    assert destination.right(source, rows)


class PollInto:
    """A transport whose polled events are kept."""

    def __init__(self, transport: Transport, events: list[Event]) -> None:
        self._transport, self._events = transport, events

    def poll(self, timeout_s: float) -> list[Event]:
        self._events += self._transport.poll(timeout_s)
        return []


def test_signals_arrive_in_order_both_ways(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB), start_transport("reader-1")
    peer = connected(transport, source)
    for number in range(50):
        transport.signal(peer, b"message-%d" % number)
    heard = [source.line_while(transport) for _ in range(50)]
    assert [line["payload"] for line in heard] == [f"message-{number}" for number in range(50)]
    assert {line["sender"] for line in heard} == {"reader-1"}
    source.tell(f"connect reader-1 {transport.address().hex()}")
    assert source.line_while(transport) == {"event": "ready", "peer": "reader-1"}
    source.tell("signal reader-1 hello")
    assert wait_for(transport, SignalReceived) == SignalReceived("source", b"hello")


def test_a_long_signal_arrives_and_a_longer_is_refused(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, transport = start_source(MIB), start_transport()
    peer = connected(transport, source)
    transport.signal(peer, b"x" * MAX_SIGNAL_BYTES)
    assert len(source.line_while(transport)["payload"]) == MAX_SIGNAL_BYTES
    with pytest.raises(ValueError, match="at most"):
        transport.signal(peer, b"x" * (MAX_SIGNAL_BYTES + 1))


def test_idle_sleeps_until_something_happens(start_source: StartSource, start_transport: StartTransport) -> None:
    """Neither the caller nor a thread of UCX's wakes up by itself. Their time says little on a busy machine, but that
    they do not spin."""
    others = threads()
    source, transport = start_source(MIB), start_transport()
    connected(transport, source)
    before, cpu_s, wall_s = wakes(threads() - others), time.thread_time(), time.monotonic()
    assert transport.poll(1.0) == []
    assert time.monotonic() - wall_s > 0.95
    assert wakes(threads() - others) - before < 10
    assert time.thread_time() - cpu_s < 0.2


def threads() -> set[str]:
    """Those of this process but the caller's: earlier tests have left some that are not idle."""
    return {each.name for each in Path("/proc/self/task").iterdir()} - {str(threading.get_native_id())}


def wakes(of: set[str]) -> int:
    """How often those threads and the caller's have slept and woken up."""
    told = [Path(f"/proc/self/task/{each}/status").read_text() for each in of]
    mine = resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return mine + sum(int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for text in told)


def test_wake_ends_a_poll_and_is_kept_for_the_next(start_transport: StartTransport) -> None:
    transport = start_transport()
    transport.wake()
    start = time.monotonic()
    assert transport.poll(20.0) == []
    timer = threading.Timer(0.1, transport.wake)
    timer.start()
    assert transport.poll(20.0) == []
    assert 0.05 < time.monotonic() - start < 10.0
    timer.join()


def test_a_second_thread_is_refused(start_transport: StartTransport) -> None:
    transport = start_transport()
    polling, errors = threading.Event(), []

    def poll() -> None:
        polling.set()
        transport.poll(20.0)

    thread = threading.Thread(target=poll)
    thread.start()
    assert polling.wait(10)
    while not errors and thread.is_alive():
        try:
            transport.address()
        except RuntimeError as error:
            errors.append(str(error))
    transport.wake()
    thread.join(10)
    assert errors == ["a second thread called a transport that is in use"]


def test_a_closed_transport_says_so_and_wake_is_harmless(start_transport: StartTransport) -> None:
    transport = start_transport()
    transport.close()
    transport.close()
    transport.wake()
    with pytest.raises(EngineError, match="closed"):
        transport.poll(0.0)


def test_registering_twice_is_refused(start_transport: StartTransport) -> None:
    transport = start_transport()
    memory = mmap.mmap(-1, MIB)
    address = np.frombuffer(memory, dtype=np.uint8).ctypes.data
    transport.register(address, MIB)
    with pytest.raises(EngineError, match="overlaps"):
        transport.register(address + 4096, 4096)


def test_addresses_of_others_are_refused(start_source: StartSource, start_transport: StartTransport) -> None:
    transport = start_transport()
    address = start_source(MIB).address
    with pytest.raises(LayoutMismatchError, match="damaged"):
        transport.connect("a", address[:-1])
    with pytest.raises(LayoutMismatchError, match="damaged"):
        transport.connect("a", b"")
    peer = transport.connect("a", address)
    with pytest.raises(EngineError, match="connected already"):
        transport.connect("a", address)
    transport.fence(peer)
    with pytest.raises(WorkerLostError, match="not connected"):
        transport.signal(peer, b"")


def test_lanes_without_error_handling_are_refused_by_name(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, transport = start_source(MIB, TLS="posix"), start_transport(TLS="posix")
    with pytest.raises(UnavailableError, match="UCX_TLS"):
        transport.connect("source", source.address)


def test_settings_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigError, match="UCX_TLS"):
        UcxTransport("x", options={"TLS": "no_such_transport"})
    with pytest.raises(ConfigError, match="RNDV_THRESH=never"):
        UcxTransport("x", options={"RNDV_THRESH": "never"})
    with pytest.raises(ConfigError, match="no/such/libucp"):
        find_library("no/such/libucp.so.0")


def test_a_library_is_found_and_named() -> None:
    library = find_library()
    assert library.version >= (*OLDEST_VERSION, 0)
    assert Path(library.path).exists()
    assert library.path in str(library)


def test_libraries_are_tried_in_their_order(tmp_path: Path) -> None:
    for name in ("libucx/lib/libucp.so.0", "nixl_cu12.libs/libucp-0a.so.0.0.0"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    assert [rule for rule, _ in library_candidates("", [str(tmp_path)])] == ["system", "nixl wheel", "libucx wheel"]
    assert list(library_candidates("/here")) == [("setting", "/here")]


def test_net_devices_are_honoured(start_source: StartSource, start_transport: StartTransport) -> None:
    options = {"TLS": "tcp", "NET_DEVICES": "lo"}
    source, transport = start_source(MIB, **options), start_transport(**options)
    assert transport.lanes(connected(transport, source)) == ("tcp/lo",)


def test_the_environment_is_honoured(start_source: StartSource) -> None:
    code = (
        "from twostroke.kv.ucx import UcxTransport\nimport sys\n"
        "t = UcxTransport('x')\n"
        "p = t.connect('s', bytes.fromhex(sys.argv[1])); t.poll(5.0)\nprint(t.lanes(p))\nt.close()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, start_source(MIB, TLS="tcp").address.hex()],
        env={"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.stdout.strip().splitlines()[-1] == "('tcp/lo',)"


def test_a_clean_close_of_the_source_is_noticed(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB), start_transport()
    peer = connected(transport, source)
    source.tell("close")
    lost = wait_for(transport, PeerLost)
    assert lost.peer == peer
    assert not transport.fence(peer)
