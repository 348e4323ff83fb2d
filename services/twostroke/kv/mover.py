"""The transfer thread of one rank: owns the transport, and everything that hand-offs do with it.

Other threads give it work with `call`, which runs a function in the thread between two polls. Outcomes come back
through the callbacks that it was made with, called in the thread.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError

from twostroke.errors import TwostrokeError, WorkerLostError
from twostroke.kv.callbacks import DigestOf
from twostroke.kv.digest import digest
from twostroke.kv.holds import TABLE_BYTES
from twostroke.kv.link import LinkReport
from twostroke.kv.probe import PROBE_BYTES, Probe, pattern
from twostroke.kv.reader import SCRATCH_WORDS, Reader
from twostroke.kv.receive import Outcome
from twostroke.kv.source import Source
from twostroke.kv.transport import (
    Event,
    Failure,
    Peer,
    PeerLost,
    PeerReady,
    Rows,
    SignalReceived,
    TicketDone,
    TicketFailed,
    Transport,
)
from twostroke.v1.kv_pb2 import KvMemory
from twostroke.v1.transfer_pb2 import TransferHello, TransferSignal

log = logging.getLogger(__name__)

IDLE_POLL_S = 0.5
WATCHING_POLL_S = 0.1
"""While something is waited for."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Whom the thread tells what; see Source and Reader. fatal: the thread has ended, and nothing moves any more."""

    renewed: Callable[[str], None]
    done: Callable[[str], None]
    outcome: Callable[[Outcome], None]
    fatal: Callable[[Exception], None]


class Mover:
    """One rank's transfers. `source` and `reader` are used within `call` only.

    memory: where the rank's KV is; its own tables are added. readers: ranks of this worker. verify, digest_of: see
    Source.
    """

    def __init__(
        self,
        transport: Transport,
        memory: KvMemory,
        callbacks: Callbacks,
        *,
        timeout_s: float,
        readers: int,
        verify: int,
        digest_of: DigestOf = digest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport = transport
        self._callbacks = callbacks
        self._timeout_s = timeout_s
        self._clock = clock
        self._pattern = pattern(transport.name).copy()
        self._probe_target = np.zeros(PROBE_BYTES, np.uint8)
        scratch = np.zeros(SCRATCH_WORDS, np.uint64)
        transport.register(memory.hold_table_address, TABLE_BYTES)
        for array in (self._pattern, self._probe_target, scratch):
            transport.register(array.ctypes.data, array.nbytes)
        self.memory = KvMemory()
        self.memory.CopyFrom(memory)
        self.memory.probe_address = self._pattern.ctypes.data
        self.memory.probe_bytes = PROBE_BYTES
        self.address = transport.address()
        self.source = Source(
            self.memory, self._send, callbacks.renewed, callbacks.done, verify=verify, digest_of=digest_of
        )
        self.reader = Reader(
            self.memory,
            scratch,
            self._greet,
            self._send,
            self._fetch,
            callbacks.outcome,
            clock,
            timeout_s=timeout_s,
            readers=readers,
            verify=bool(verify),
            digest_of=digest_of,
        )
        self._addresses: dict[str, bytes] = {}
        self._peers: dict[str, Peer] = {}
        self._greeted: set[str] = set()
        self._over: dict[int, tuple[str, Callable[[str | None], None]]] = {}
        """Reads that are not over, by ticket; those that were refused at once have negative numbers."""
        self._refused = itertools.count(-1, -1)
        self._probes: deque[Probe] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="twostroke-kv", daemon=True)

    @property
    def name(self) -> str:
        """The name of the rank's transport."""
        return self._transport.name

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def call(self, function: Callable[[], None]) -> None:
        """Runs a function in the thread, soon. From any thread."""
        self._calls.append(function)
        self._transport.wake()

    def close(self) -> None:
        """Ends the thread and all connections. Registered memory may be unmapped afterwards."""
        self._closing = True
        self._transport.wake()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._transport.close()

    def know(self, name: str, address: bytes) -> None:
        """Where a peer is. In the thread."""
        self._addresses[name] = address

    def probe(
        self, name: str, address: bytes, remote: KvMemory, over: Callable[[LinkReport | TwostrokeError], None]
    ) -> None:
        """Tries the link to a source. In the thread; `over` is called there."""

        def lanes() -> tuple[str, ...]:
            return self._transport.lanes(self._peers[name])

        def ended(outcome: LinkReport | TwostrokeError) -> None:
            was_first = self._probes[0] is probe
            self._probes.remove(probe)
            over(outcome)
            if was_first:
                self._next_probe()

        self.know(name, address)
        probe = Probe(
            name, remote, self._probe_target, self._fetch, self._clock, lanes, ended, timeout_s=self._timeout_s
        )
        self._probes.append(probe)
        if len(self._probes) == 1:
            self._next_probe()

    def drop(self, prefix: str) -> None:
        """Forgets the peers whose names begin so: they have ended. In the thread."""
        for name in [name for name in {*self._addresses, *self._peers} if name.startswith(prefix)]:
            self._lose(name, f"{name} has ended", again=False)
            self._addresses.pop(name, None)

    def _next_probe(self) -> None:
        if self._probes:
            probe = self._probes[0]
            self._greet(probe.source)
            # Not at once: the greeting may have failed, and then the probe has, too.
            self._calls.append(lambda: probe.run() if self._probes and self._probes[0] is probe else None)

    def _run(self) -> None:
        ticked_s = self._clock()
        wait_s = IDLE_POLL_S
        try:
            while not self._closing:
                for event in self._transport.poll(min(wait_s, IDLE_POLL_S)):
                    self._handle(event)
                while self._calls:
                    self._calls.popleft()()
                wait_s = min(self.source.work(), WATCHING_POLL_S if len(self.reader) else IDLE_POLL_S)
                if self._calls:
                    wait_s = 0.0
                if self._clock() - ticked_s > WATCHING_POLL_S / 2:
                    ticked_s = self._clock()
                    for name, message in self.reader.tick():
                        self._lose(name, message, again=False)
        except Exception as error:
            log.exception("the transfer thread ends")
            with suppress(TwostrokeError):
                self._transport.close()
            self.reader.stop(f"the transfer thread has ended: {error}")
            self._callbacks.fatal(error)

    def _handle(self, event: Event) -> None:
        match event:
            case SignalReceived(sender, payload):
                try:
                    signal = TransferSignal.FromString(payload)
                except DecodeError:
                    log.warning("%s said what is not understood; run one version", sender)
                else:
                    self._hear(sender, signal)
            case TicketDone(ticket):
                self._read_ended(ticket.id, None)
            case TicketFailed(ticket, failure, message):
                if ticket.id in self._over:
                    # One that had all its time is not worth another try.
                    self._lose(ticket.peer.peer_id, message, again=failure is not Failure.DEADLINE)
            case PeerLost(peer, message):
                if self._peers.get(peer.peer_id) == peer:
                    self._lose(peer.peer_id, f"{peer.peer_id}: {message}", again=True)
            case PeerReady(peer):
                if self._peers.get(peer.peer_id) == peer:
                    log.info("KV link to %s uses %s", peer.peer_id, ", ".join(self._transport.lanes(peer)) or "?")

    def _hear(self, sender: str, signal: TransferSignal) -> None:
        match signal.WhichOneof("message"):
            case "hello":
                self.know(sender, signal.hello.address)
                self.source.hello(sender)
            case "ticket":
                self.source.ticket(sender, signal.ticket)
            case "done":
                for handoff_id in signal.done.handoff_ids:
                    self.source.read(sender, handoff_id)
            case "ready":
                self.reader.ready(sender, signal.ready)
            case "digest":
                self.reader.digests(sender, signal.digest)
            case "final":
                self.reader.final(sender, signal.final)
            case "gone":
                self.reader.gone(sender, signal.gone)
            case "held":
                self.reader.held(sender)

    def _connected(self, name: str) -> Peer | None:
        peer = self._peers.get(name)
        address = self._addresses.get(name)
        if peer is None and address is not None:
            try:
                peer = self._peers[name] = self._transport.connect(name, address, self._timeout_s)
            except TwostrokeError as error:
                message = error.message
                self._calls.append(lambda: self._lose(name, message, again=False))
        return peer

    def _greet(self, name: str) -> None:
        """Makes sure that a source knows who reads from it."""
        if name not in self._greeted and self._connected(name) is not None:
            self._greeted.add(name)
            self._send(name, TransferSignal(hello=TransferHello(address=self.address)))

    def _send(self, name: str, signal: TransferSignal) -> None:
        peer = self._connected(name)
        if peer is None:
            return
        try:
            self._transport.signal(peer, signal.SerializeToString())
        except TwostrokeError as error:
            message = error.message
            self._calls.append(lambda: self._lose(name, message, again=True, peer=peer))

    def _fetch(self, name: str, rows: Rows, deadline_s: float, over: Callable[[str | None], None]) -> bool:
        peer = self._peers.get(name)
        if peer is None:
            return False
        try:
            ticket = self._transport.get_batch(peer, rows, deadline_s)
        except WorkerLostError:
            return False
        except ValueError as error:
            message, number = str(error), next(self._refused)
            self._over[number] = name, over
            self._calls.append(lambda: self._read_ended(number, message))
            return True
        self._over[ticket.id] = name, over
        return True

    def _read_ended(self, number: int, refused: str | None) -> None:
        _, over = self._over.pop(number, ("", None))
        if over is not None:
            over(refused)

    def _lose(self, name: str, message: str, *, again: bool, peer: Peer | None = None) -> None:
        """Fences a peer and tells whom it concerns. peer: only if it is still this connection."""
        known = self._peers.get(name)
        if peer is not None and known != peer:
            return
        log.warning("KV link to %s is lost: %s", name, message)
        quarantine = self._transport.fence(known) if known is not None else None
        self._peers.pop(name, None)
        self._greeted.discard(name)
        for ticket_id in [ticket_id for ticket_id, (source, _) in self._over.items() if source == name]:
            del self._over[ticket_id]
        self.source.hello(name)
        for probe in [probe for probe in self._probes if probe.source == name]:
            probe.fail(WorkerLostError(f"the link to {name} does not work: {message}"))
        self.reader.lost(name, message, quarantine, again=again)
