"""Peers that die, stop, come back: every transfer ends, nothing lands late, and the other side lives on."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import WorkerLostError
from twostroke.kv.transport import (
    Event,
    Failure,
    Peer,
    PeerLost,
    PeerReady,
    Ticket,
    TicketDone,
    TicketFailed,
    Transport,
)
from twostroke.kv.ucx import FENCE_LIMIT_S
from unit.kv.kv_process import Destination, SourceProcess, connected, outcome, until, wait_for

StartSource = Callable[..., SourceProcess]
StartTransport = Callable[..., Transport]

MIB = 1 << 20
LANES = {"cma": {"TLS": "cma,tcp"}, "tcp": {"TLS": "tcp"}}


def begin(
    transport: Transport, destination: Destination, source: SourceProcess, deadline_s: float
) -> tuple[Peer, Ticket]:
    """Connects, and starts a transfer that is under way and far from its end."""
    peer = connected(transport, source)
    rows = np.concatenate([destination.rows(source, 65536, seed) for seed in range(40)])
    ticket = transport.get_batch(peer, rows, deadline_s)
    until(lambda: bool(destination.memory.any()), transport)
    return peer, ticket


@pytest.mark.parametrize("lanes", LANES)
def test_killing_the_source_fails_the_transfer_and_leaves_other_peers(
    start_source: StartSource, start_transport: StartTransport, lanes: str
) -> None:
    victim, other = start_source(16 * MIB, **LANES[lanes]), start_source(16 * MIB, name="other", seed=9, **LANES[lanes])
    transport = start_transport(**LANES[lanes])
    destination = Destination(transport, 16 * MIB)
    healthy = connected(transport, other, "other")
    peer, ticket = begin(transport, destination, victim, 5.0)
    victim.signal(signal.SIGKILL)
    start = time.monotonic()
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    assert time.monotonic() - start < 6.0
    assert failed.failure in (Failure.PEER_LOST, Failure.ERROR)
    assert not transport.fence(peer)
    rows = destination.rows(other, 65536)
    ticket = transport.get_batch(healthy, rows, 30.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    assert destination.right(other, rows)


@pytest.mark.parametrize("lanes", LANES)
def test_killing_an_idle_source_is_noticed(
    start_source: StartSource, start_transport: StartTransport, lanes: str
) -> None:
    source, transport = start_source(MIB, **LANES[lanes]), start_transport(**LANES[lanes])
    peer = connected(transport, source)
    source.signal(signal.SIGKILL)
    assert wait_for(transport, PeerLost).peer == peer
    with pytest.raises(WorkerLostError):
        transport.signal(peer, b"anyone?")
    assert not transport.fence(peer)


def test_a_stopped_source_costs_no_more_than_the_deadline_and_nothing_lands_late(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, transport = start_source(16 * MIB, TLS="tcp"), start_transport(TLS="tcp")
    destination = Destination(transport, 16 * MIB)
    peer, ticket = begin(transport, destination, source, 1.0)
    source.signal(signal.SIGSTOP)
    start = time.monotonic()
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    assert failed.failure is Failure.DEADLINE
    assert time.monotonic() - start < 2.0
    assert not transport.fence(peer)
    destination.memory[:] = 0xA5
    source.signal(signal.SIGCONT)
    again = connected(transport, source)
    assert (destination.memory == 0xA5).all()
    rows = destination.rows(source, 65536)
    ticket = transport.get_batch(again, rows, 30.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    assert destination.right(source, rows)


def test_a_fence_fails_the_open_tickets_of_that_peer_only(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, other = start_source(16 * MIB, TLS="tcp"), start_source(16 * MIB, name="other", TLS="tcp")
    transport = start_transport(TLS="tcp")
    destination, elsewhere = Destination(transport, 16 * MIB), Destination(transport, 16 * MIB)
    healthy = connected(transport, other, "other")
    rows = elsewhere.rows(other, 65536)
    kept = transport.get_batch(healthy, rows, 30.0)
    peer, ticket = begin_beside(transport, destination, source)
    start = time.monotonic()
    assert not transport.fence(peer)
    assert time.monotonic() - start < FENCE_LIMIT_S
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    assert failed.failure is Failure.FENCED
    assert not transport.fence(peer)
    with pytest.raises(WorkerLostError):
        transport.get_batch(peer, rows, 1.0)
    again = transport.get_batch(healthy, rows, 30.0)
    assert outcome(transport, again) == TicketDone(again)
    assert elsewhere.right(other, rows)
    assert kept.id < again.id


def begin_beside(transport: Transport, destination: Destination, source: SourceProcess) -> tuple[Peer, Ticket]:
    """As begin, while other peers have events."""
    peer = transport.connect("source", source.address)
    wait_for(transport, PeerReady, seen=[])
    rows = np.concatenate([destination.rows(source, 65536, seed) for seed in range(40)])
    return peer, transport.get_batch(peer, rows, 30.0)


def test_a_restarted_source_with_other_memory_is_read(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    transport = start_transport()
    destination = Destination(transport, 4 * MIB)
    for seed in (1, 500, 900):
        source = start_source(4 * MIB, seed=seed)
        peer = connected(transport, source)
        rows = destination.rows(source, 65536)
        ticket = transport.get_batch(peer, rows, 30.0)
        assert outcome(transport, ticket) == TicketDone(ticket)
        assert destination.right(source, rows)
        source.signal(signal.SIGKILL)
        assert wait_for(transport, PeerLost).peer == peer
        transport.fence(peer)


def test_a_connect_that_nobody_answers_ends_by_its_deadline(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, transport = start_source(MIB, TLS="tcp"), start_transport(TLS="tcp")
    source.signal(signal.SIGSTOP)
    start = time.monotonic()
    peer = transport.connect("source", source.address, deadline_s=0.5)
    lost = wait_for(transport, PeerLost)
    assert lost.peer == peer
    assert "deadline" in lost.message
    assert 0.4 < time.monotonic() - start < 1.5
    assert not transport.fence(peer)
    source.signal(signal.SIGCONT)
    connected(transport, source)


@pytest.mark.parametrize("lanes", LANES)
def test_a_source_survives_readers_that_die_in_the_middle(
    start_source: StartSource, start_transport: StartTransport, lanes: str
) -> None:
    """UCX ends a source whose reader dies during an emulated GET, so tcp must not use one."""
    source = start_source(16 * MIB, **LANES[lanes])
    for number in range(3):
        victim = start_reader(start_source, source, number, lanes)
        source.signal(signal.SIGSTOP)
        victim.end()
        source.signal(signal.SIGCONT)
    transport = start_transport(**LANES[lanes])
    destination = Destination(transport, 16 * MIB)
    peer = connected(transport, source)
    rows = destination.rows(source, 65536)
    ticket = transport.get_batch(peer, rows, 30.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    assert destination.right(source, rows)
    assert source.process.poll() is None


def start_reader(start_source: StartSource, source: SourceProcess, number: int, lanes: str) -> SourceProcess:
    """A process that reads from the source until it is killed."""
    reader = start_source(16 * MIB, name=f"reader-{number}", **LANES[lanes])
    reader.tell(f"connect source {source.address.hex()}")
    assert reader.line() == {"event": "ready", "peer": "source"}
    reader.tell(f"read source {source.base}")
    assert reader.line() == {"event": "reading"}
    return reader


def test_reconnecting_again_and_again_leaks_no_descriptors(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, transport = start_source(MIB), start_transport()
    destination = Destination(transport, MIB)
    counts = []
    for _ in range(12):
        peer = connected(transport, source)
        ticket = transport.get_batch(peer, destination.rows(source, 4096), 30.0)
        assert outcome(transport, ticket) == TicketDone(ticket)
        transport.fence(peer)
        counts.append(descriptors(source.process.pid))
    assert counts[-1] <= counts[2] + 2


def descriptors(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_a_peer_that_died_before_its_fence_is_lost_at_most_once(
    start_source: StartSource, start_transport: StartTransport
) -> None:
    source, transport = start_source(MIB), start_transport()
    peer = connected(transport, source)
    source.signal(signal.SIGKILL)
    source.process.wait()
    assert not transport.fence(peer)
    events: list[Event] = transport.poll(0.2) + transport.poll(0.2)
    assert [type(event) for event in events] in ([], [PeerLost])
    source = start_source(MIB)
    connected(transport, source)
