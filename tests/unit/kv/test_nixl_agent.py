"""The NIXL backend keeps the same interface, and says by quarantine what it cannot promise."""

import signal
import time
from collections.abc import Callable

import numpy as np
import pytest

from twostroke.errors import EngineError, LayoutMismatchError, WorkerLostError
from twostroke.kv.transport import (
    Failure,
    SignalReceived,
    TicketDone,
    TicketFailed,
    Transport,
)
from unit.kv.kv_process import Destination, SourceProcess, connected, outcome, until, wait_for

pytest.importorskip("nixl")

StartSource = Callable[..., SourceProcess]
StartTransport = Callable[..., Transport]

MIB = 1 << 20


def test_scattered_blocks_arrive(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(8 * MIB, backend="nixl"), start_transport(backend="nixl")
    destination = Destination(transport, 8 * MIB)
    peer = connected(transport, source)
    for block in (4096, 65536):
        destination.memory[:] = 0
        rows = destination.rows(source, block)
        ticket = transport.get_batch(peer, rows, 30.0)
        assert outcome(transport, ticket) == TicketDone(ticket)
        assert destination.right(source, rows)
    assert not transport.fence(peer)


def test_signals_go_both_ways(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB, backend="nixl"), start_transport("reader-1", backend="nixl")
    peer = connected(transport, source)
    transport.signal(peer, b"hello")
    assert source.line_while(transport) == {"event": "signal", "sender": "reader-1", "payload": "hello"}
    source.tell(f"connect reader-1 {transport.address().hex()}")
    assert source.line_while(transport) == {"event": "ready", "peer": "reader-1"}
    source.tell("signal reader-1 world")
    assert wait_for(transport, SignalReceived) == SignalReceived("source", b"world")


def test_bad_rows_and_expired_deadlines(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB, backend="nixl"), start_transport(backend="nixl")
    destination = Destination(transport, MIB)
    peer = connected(transport, source)
    with pytest.raises(ValueError, match="registered"):
        transport.get_batch(peer, np.array([[8, source.base, 8]], dtype=np.int64), 5.0)
    ticket = transport.get_batch(peer, destination.rows(source, 4096), 0.0)
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    assert failed.failure is Failure.DEADLINE
    assert not transport.fence(peer), "nothing was posted, so nothing can land"
    assert not destination.memory.any()


def test_a_dead_source_fails_the_next_read(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB, backend="nixl"), start_transport(backend="nixl")
    destination = Destination(transport, MIB)
    peer = connected(transport, source)
    rows = destination.rows(source, 4096)
    ticket = transport.get_batch(peer, rows, 5.0)
    assert outcome(transport, ticket) == TicketDone(ticket)
    source.signal(signal.SIGKILL)
    source.process.wait()
    ticket = transport.get_batch(peer, rows, 5.0)
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    transport.fence(peer)
    with pytest.raises(WorkerLostError):
        transport.get_batch(peer, rows, 5.0)


def test_a_transfer_given_up_leaves_its_memory_in_quarantine(
    start_source: StartSource, start_transport: StartTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    source, transport = start_source(16 * MIB, backend="nixl"), start_transport(backend="nixl")
    destination = Destination(transport, 16 * MIB)
    peer = connected(transport, source)
    warm = transport.get_batch(peer, destination.rows(source, 4096)[:1], 10.0)
    assert outcome(transport, warm) == TicketDone(warm)
    source.signal(signal.SIGSTOP)
    rows = destination.rows(source, 65536)
    ticket = transport.get_batch(peer, rows, 0.5)
    start = time.monotonic()
    failed = outcome(transport, ticket)
    assert isinstance(failed, TicketFailed)
    assert failed.failure is Failure.DEADLINE
    assert time.monotonic() - start < 1.5
    quarantine = transport.fence(peer)
    assert sorted(quarantine.ranges) == sorted((local, nbytes) for local, _, nbytes in rows.tolist())
    assert quarantine.overlaps(destination.memory.ctypes.data + MIB, 1)
    source.signal(signal.SIGKILL)


def test_idle_costs_little_and_wake_ends_a_poll(start_transport: StartTransport) -> None:
    transport = start_transport(backend="nixl")
    cpu_s = time.process_time()
    assert transport.poll(1.0) == []
    assert time.process_time() - cpu_s < 0.3
    transport.wake()
    start = time.monotonic()
    assert transport.poll(20.0) == []
    assert time.monotonic() - start < 5.0


def test_backends_do_not_mix(start_source: StartSource, start_transport: StartTransport) -> None:
    source, transport = start_source(MIB), start_transport(backend="nixl")
    with pytest.raises(LayoutMismatchError, match="moves KV with ucx"):
        transport.connect("source", source.address)
    transport.close()
    with pytest.raises(EngineError, match="closed"):
        transport.address()
    until(lambda: source.process.poll() is None, start_transport())
