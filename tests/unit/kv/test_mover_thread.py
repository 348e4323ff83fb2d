"""The transfer thread over a transport that does what the test says."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from twostroke.errors import KvCorruptError, LayoutMismatchError, TwostrokeError, UnavailableError, WorkerLostError
from twostroke.kv.holds import TABLE_BYTES
from twostroke.kv.link import LinkReport
from twostroke.kv.memory import Blocks
from twostroke.kv.mover import Callbacks, Mover
from twostroke.kv.probe import PROBE_BYTES, pattern
from twostroke.kv.receive import Outcome, Part, Receive
from twostroke.kv.transport import (
    Event,
    Failure,
    Peer,
    PeerLost,
    Quarantine,
    Region,
    Rows,
    SignalReceived,
    Ticket,
    TicketDone,
    TicketFailed,
)
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import TransferHello, TransferReady, TransferSignal, TransferTicket
from unit.kv.kv_fakes import FakeRank, copy


class FakeTransport:
    """Notes what it is told, and hands out the events that the test puts in."""

    backend = "fake"
    name = "d/1/0"

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.peers: list[Peer] = []
        self.fenced: list[str] = []
        self.signals: list[tuple[str, TransferSignal]] = []
        self.tickets: list[tuple[Ticket, Rows]] = []
        self.connect_error: TwostrokeError | None = None
        self.read_error: ValueError | None = None
        self.closed = False

    def register(self, address: int, nbytes: int) -> Region:
        return Region(address, nbytes, 0)

    def address(self) -> bytes:
        return b"my address"

    def connect(self, peer_id: str, address: bytes, deadline_s: float = 5.0) -> Peer:
        assert address
        assert deadline_s == 10.0
        if self.connect_error is not None:
            raise self.connect_error
        self.peers.append(Peer(peer_id, len(self.peers)))
        return self.peers[-1]

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        return ("fake",) if peer in self.peers else ()

    def get_batch(self, peer: Peer, rows: Rows, deadline_s: float) -> Ticket:
        if self.read_error is not None:
            raise self.read_error
        ticket = Ticket(len(self.tickets) + 1, peer, int(rows[:, 2].sum()))
        self.tickets.append((ticket, rows.copy()))
        return ticket

    def signal(self, peer: Peer, payload: bytes) -> None:
        assert peer in self.peers
        self.signals.append((peer.peer_id, TransferSignal.FromString(payload)))

    def poll(self, timeout_s: float) -> list[Event]:
        try:
            return self.events.get(timeout=timeout_s)
        except queue.Empty:
            return []

    def fence(self, peer: Peer) -> Quarantine:
        self.fenced.append(peer.peer_id)
        return Quarantine()

    def wake(self) -> None:
        self.events.put([])

    def close(self) -> None:
        self.closed = True


class Bench:
    """A mover over it."""

    def __init__(self) -> None:
        self.transport = FakeTransport()
        self.rank, self.remote = FakeRank(), FakeRank()
        self.table = np.zeros(TABLE_BYTES, np.uint8)
        self.rank.memory.hold_table_address = self.table.ctypes.data
        self.outcomes: list[Outcome] = []
        self.fatal: list[Exception] = []
        self.renewed: list[str] = []
        callbacks = Callbacks(self.renewed.append, lambda _: None, self.outcomes.append, self.fatal.append)
        self.mover = Mover(self.transport, self.rank.memory, callbacks, timeout_s=10.0, readers=1, verify=False)
        self.mover.start()

    def do(self, *functions: Callable[[], None]) -> None:
        """Runs them in the thread, and what follows from them."""
        for function in functions:
            self.mover.call(function)
        for _ in range(3):
            done = threading.Event()
            self.mover.call(done.set)
            assert done.wait(10.0)

    def happen(self, *events: Event) -> None:
        """The transport has these to tell, at once."""
        self.transport.events.put(list(events))
        self.do()

    def hear(self, name: str, **message: object) -> None:
        self.happen(SignalReceived(name, TransferSignal(**message).SerializeToString()))  # type: ignore[arg-type]

    def expect(self, name: str = "p/1/0", request_id: str = "r") -> None:
        part = Part(name, self.remote.memory, None)

        def expect() -> None:
            self.mover.know(name, b"an address")
            self.mover.reader.expect(Receive(request_id, "h", 0, 1, [part], time.monotonic()))
            self.mover.reader.begin(request_id, Blocks(0, [1, 2]))

        self.do(expect)

    def ready(self, name: str = "p/1/0", blocks: Sequence[int] = (3, 4)) -> None:
        self.hear(name, ready=TransferReady(handoff_id="h", block_ids=blocks))

    def kinds(self) -> list[tuple[str, str | None]]:
        """Signals sent since the last look."""
        sent, self.transport.signals = self.transport.signals, []
        return [(name, signal.WhichOneof("message")) for name, signal in sent]


@pytest.fixture
def bench() -> Iterator[Bench]:
    one = Bench()
    yield one
    one.mover.close()
    assert one.transport.closed
    assert not one.fatal


def test_a_source_is_greeted_once_before_the_first_ticket(bench: Bench) -> None:
    bench.expect()
    bench.expect(request_id="second")
    assert bench.kinds() == [("p/1/0", "hello"), ("p/1/0", "ticket"), ("p/1/0", "ticket")]


def test_a_read_that_had_all_its_time_is_not_tried_again(bench: Bench) -> None:
    """O-33: else a stopped source would cost twice the deadline."""
    bench.expect()
    bench.ready()
    ((ticket, _),) = bench.transport.tickets
    bench.happen(TicketFailed(ticket, Failure.DEADLINE, "not complete by its deadline"))
    assert [outcome.failure for outcome in bench.outcomes] == ["not complete by its deadline"]
    assert bench.transport.fenced == ["p/1/0"]


def test_a_lost_connection_is_tried_again_and_its_events_are_old(bench: Bench) -> None:
    """O-79: what the old connection had still to say is not taken for the new one's."""
    bench.expect()
    bench.ready()
    old, ((ticket, rows),) = bench.transport.peers[0], bench.transport.tickets
    bench.kinds()
    bench.happen(
        TicketFailed(ticket, Failure.PEER_LOST, "reset"),
        PeerLost(old, "reset"),
        TicketFailed(ticket, Failure.FENCED, ""),
    )
    assert bench.transport.fenced == ["p/1/0"]
    assert bench.kinds() == [("p/1/0", "hello"), ("p/1/0", "ticket")]
    assert bench.outcomes == []
    bench.happen(TicketDone(ticket))
    bench.ready()
    assert [row.tolist() for _, row in bench.transport.tickets] == [rows.tolist()] * 2


def test_a_source_that_cannot_be_connected_fails_what_waits_for_it(bench: Bench) -> None:
    bench.transport.connect_error = LayoutMismatchError("the peer moves KV with nixl, this worker with ucx; use one")
    bench.expect()
    assert [outcome.failure for outcome in bench.outcomes] == [bench.transport.connect_error.message]
    bench.transport.connect_error = None
    bench.expect(request_id="next")
    assert ("p/1/0", "ticket") in bench.kinds()


def test_a_refused_batch_fails_its_request_and_not_the_connection(bench: Bench) -> None:
    bench.expect()
    bench.transport.read_error = ValueError("row 0 is not registered memory")
    bench.ready()
    assert [outcome.failure for outcome in bench.outcomes] == ["row 0 is not registered memory"]
    assert bench.transport.fenced == []


def test_a_dropped_worker_is_forgotten_with_all_that_waits_for_it(bench: Bench) -> None:
    """O-79: under its prefix, and only that."""
    bench.expect("p/1/0", "old")
    bench.expect("p/2/0", "new")
    bench.do(lambda: bench.mover.drop("p/1/"))
    assert [(outcome.request_id, outcome.failure) for outcome in bench.outcomes] == [("old", "p/1/0 has ended")]
    assert bench.transport.fenced == ["p/1/0"]
    bench.kinds()
    bench.hear("p/1/0", ticket=TransferTicket(handoff_id="unknown"))
    assert bench.kinds() == []
    bench.hear("p/1/0", hello=TransferHello(address=b"it is back"))
    bench.hear("p/1/0", ticket=TransferTicket(handoff_id="unknown"))
    assert bench.kinds() == [("p/1/0", "held")]


def test_a_reader_that_is_lost_is_reached_again_by_its_address(bench: Bench) -> None:
    bench.hear("r/1/0", hello=TransferHello(address=b"where"))
    bench.do(lambda: bench.mover.source.offer("h"))
    bench.hear("r/1/0", ticket=TransferTicket(handoff_id="h", readers=1))
    bench.happen(PeerLost(bench.transport.peers[0], "reset"))
    bench.kinds()
    bench.do(lambda: bench.mover.source.announce("h", Blocks(0, [1])))
    assert bench.kinds() == []
    bench.hear("r/1/0", ticket=TransferTicket(handoff_id="h", readers=1))
    assert bench.kinds() == [("r/1/0", "held"), ("r/1/0", "ready")]
    assert bench.renewed == ["h", "h"]


def test_a_signal_that_is_none_is_passed_over(bench: Bench) -> None:
    """O-43, O-93."""
    bench.happen(SignalReceived("stranger", b"\xff\xff\xff"))
    bench.expect()
    assert bench.kinds() == [("p/1/0", "hello"), ("p/1/0", "ticket")]


def probe(bench: Bench, name: str, ended: list[tuple[str, object]]) -> None:
    remote = KvMemory(probe_address=1, probe_bytes=PROBE_BYTES)
    bench.do(lambda: bench.mover.probe(name, b"an address", remote, lambda outcome: ended.append((name, outcome))))


def test_probes_wait_for_each_other_and_the_loss_of_one_leaves_the_other(bench: Bench) -> None:
    """O-77: they share the memory that they read into."""
    ended: list[tuple[str, object]] = []
    bench.expect("p/1/0", "r")
    probe(bench, "q/1/0", ended)
    probe(bench, "p/1/0", ended)
    assert len(bench.transport.tickets) == 1
    lost = next(peer for peer in bench.transport.peers if peer.peer_id == "p/1/0")
    bench.happen(PeerLost(lost, "reset"))
    assert [name for name, _ in ended] == ["p/1/0"]
    assert isinstance(ended[0][1], WorkerLostError)
    content = pattern("q/1/0").copy()
    for number in range(3):
        assert len(bench.transport.tickets) == number + 1
        ticket, rows = bench.transport.tickets[-1]
        copy(np.array([[rows[0, 0], content.ctypes.data, rows[0, 2]]], np.int64))
        bench.happen(TicketDone(ticket))
    assert ended[1][0] == "q/1/0"
    assert isinstance(ended[1][1], LinkReport)
    assert ended[1][1].lanes == ("fake",)


def test_a_probe_that_brings_wrong_bytes_lets_the_next_one_begin(bench: Bench) -> None:
    ended: list[tuple[str, object]] = []
    probe(bench, "q/1/0", ended)
    probe(bench, "p/1/0", ended)
    for _ in range(3):
        bench.happen(TicketDone(bench.transport.tickets[-1][0]))
    assert isinstance(ended[0][1], KvCorruptError)
    assert bench.transport.tickets[-1][0].peer.peer_id == "p/1/0"


def test_an_unreachable_probe_ends_at_once(bench: Bench) -> None:
    ended: list[tuple[str, object]] = []
    bench.transport.connect_error = UnavailableError("no route")
    probe(bench, "q/1/0", ended)
    assert isinstance(ended[0][1], WorkerLostError)
    assert "no route" in str(ended[0][1])


def test_an_error_of_the_transport_ends_everything_and_is_told_as_fatal() -> None:
    """O-35: nobody waits for a thread that is gone; the transport is closed first, so that nothing is written."""
    bench = Bench()
    bench.expect()
    bench.ready()

    def broken(timeout_s: float) -> list[Event]:
        raise RuntimeError("the device is gone")

    bench.mover.call(lambda: setattr(bench.transport, "poll", broken))
    end = time.monotonic() + 10.0
    while not bench.fatal and time.monotonic() < end:
        time.sleep(0.005)
    assert [str(error) for error in bench.fatal] == ["the device is gone"]
    assert [outcome.failure for outcome in bench.outcomes] == ["the transfer thread has ended: the device is gone"]
    assert bench.transport.closed
    bench.mover.close()
