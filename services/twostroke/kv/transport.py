"""How KV bytes move between workers: one-sided reads of remote memory, and small messages beside them.

    reader                                   source
    register(memory)                         register(memory)
                      <-- address() --
    connect(id, address) -> Peer
    poll() -> PeerReady                      poll()     some backends answer reads from here
    get_batch(peer, rows) -> Ticket
    poll() -> TicketDone | TicketFailed
    fence(peer)              after every failure, before the memory is used again

Ownership. A transport is used by one thread at a time, a transfer thread, which does little but poll. Making it and
registering memory in another thread, before that one starts, is fine. A second thread that calls while a call runs gets
RuntimeError. Only `wake` may be called from anywhere, at any time. No method may be called from a signal handler, and a
transport does not survive a fork.

Cancellation. Nothing is cancelled singly: no library takes a read back once it is posted. To give up is to fence the
peer, which ends all its transfers. A ticket that fails says nothing about its memory: any byte of it may be old, new or
still to come until fence has returned, and what the returned quarantine names may be written even after that.

Memory. Registered memory stays mapped, at the same place, until the transport is closed and no peer is connected any
more: a source over tcp copies from it on its peers' word, and ends with a segmentation fault where it is gone.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from twostroke.errors import DeadlineError, LayoutMismatchError, TwostrokeError, UnavailableError, WorkerLostError

Rows = npt.NDArray[np.int64]
"""Shape (N, 3): local address, remote address, bytes."""

RDMA_TRANSPORTS = ("rc", "dc", "ud", "srd")


class Failure(Enum):
    """Why a ticket failed."""

    DEADLINE = "deadline"
    PEER_LOST = "peer lost"
    FENCED = "fenced"
    """The peer was fenced, or the transport closed, while the ticket was open."""
    ERROR = "error"
    """The library refused or failed a read; the peer may be well."""


@dataclass(frozen=True, slots=True)
class Region:
    """Registered local memory. handle: the backend's own."""

    address: int
    nbytes: int
    handle: int


@dataclass(frozen=True, slots=True)
class Peer:
    """One connection to another transport. A later connect to the same peer_id gives another handle."""

    peer_id: str
    handle: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """A batch of reads. nbytes: of all rows."""

    id: int
    peer: Peer
    nbytes: int


@dataclass(frozen=True, slots=True)
class PeerReady:
    """The connection stands. Its lanes are final from now on."""

    peer: Peer


@dataclass(frozen=True, slots=True)
class PeerLost:
    """The peer died, closed, or was not reached by the deadline of its connect. Comes once per Peer.

    Its open tickets fail too, before or after this. The owner fences it, and may connect again then.
    """

    peer: Peer
    message: str


@dataclass(frozen=True, slots=True)
class TicketDone:
    """All bytes of the ticket are in local memory, and none of its reads will touch it again."""

    ticket: Ticket


@dataclass(frozen=True, slots=True)
class TicketFailed:
    """The ticket is over. Its local memory is not safe to use before fence(ticket.peer) has returned."""

    ticket: Ticket
    failure: Failure
    message: str

    def error(self) -> TwostrokeError:
        """The same as an exception: DeadlineError, WorkerLostError or UnavailableError."""
        kinds = {Failure.DEADLINE: DeadlineError, Failure.PEER_LOST: WorkerLostError}
        kind = kinds.get(self.failure, UnavailableError)
        return kind(f"the read of {self.ticket.nbytes} bytes from {self.ticket.peer.peer_id} failed: {self.message}")


@dataclass(frozen=True, slots=True)
class SignalReceived:
    """A message from the transport named `sender`. Signals of one connection arrive in order, each once or never."""

    sender: str
    payload: bytes


Event = PeerReady | PeerLost | TicketDone | TicketFailed | SignalReceived


@dataclass(frozen=True, slots=True)
class Quarantine:
    """Local memory that may still be written after a fence, until the transport is closed: (address, bytes). Empty
    means that none is."""

    ranges: tuple[tuple[int, int], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.ranges)

    def overlaps(self, address: int, nbytes: int) -> bool:
        """Whether any byte of the range is in quarantine."""
        return any(address < start + size and start < address + nbytes for start, size in self.ranges)


class Transport(Protocol):
    """A way to read other workers' memory; the module says who may call it when."""

    @property
    def backend(self) -> str:
        """ "ucx" or "nixl". Both ends use the same."""
        ...

    @property
    def name(self) -> str:
        """Under which peers see signals from here. Differs for every start of every worker."""
        ...

    def register(self, address: int, nbytes: int) -> Region:
        """Makes memory readable by peers that connect with an address taken later, and writable by own reads.

        Raises EngineError when the memory cannot be registered (with RDMA often the locked-memory limit) or overlaps a
        registered region.
        """
        ...

    def address(self) -> bytes:
        """All that a peer needs to connect and to read every region registered so far; about 0.1-2 KB."""
        ...

    def connect(self, peer_id: str, address: bytes, deadline_s: float = 5.0) -> Peer:
        """Begins to connect; PeerReady or, within deadline_s seconds, PeerLost follows. Reads and signals may be
        posted at once, and wait for the connection.

        Raises LayoutMismatchError for an address of another backend or version, EngineError while peer_id is connected
        already (fence it first), UnavailableError when the library refuses at once.
        """
        ...

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        """The transports in use, as "cma/memory", "tcp/lo", "rc_mlx5/mlx5_0:1". Final once PeerReady has come; empty
        when the backend cannot tell or the peer is fenced."""
        ...

    def get_batch(self, peer: Peer, rows: Rows, deadline_s: float) -> Ticket:
        """Reads a list of ranges from the peer's registered memory into own registered memory. One event follows.

        rows: int64 of shape (N, 3), see Rows; copied. Rows may run over regions that touch. Merge neighbours with
        merge_runs first. deadline_s: seconds from now; 0 or less fails with the next poll and reads nothing. Tickets
        of one peer are worked on in order.

        Raises ValueError for a row outside the registered memory of either side (nothing was read), WorkerLostError
        when the peer is fenced or unknown.
        """
        ...

    def signal(self, peer: Peer, payload: bytes) -> None:
        """Queues a message of at most MAX_SIGNAL_BYTES. It may be lost with the peer, without further notice than
        PeerLost.

        Raises ValueError when it is too long, WorkerLostError when the peer is lost or fenced, OverloadedError when
        the peer has not taken thousands of earlier ones.
        """
        ...

    def poll(self, timeout_s: float) -> list[Event]:
        """Waits up to timeout_s seconds for events; empty after a wake or at the end of the time. Releases the GIL and
        sleeps while there is nothing to do. All progress, deadlines included, happens in here."""
        ...

    def fence(self, peer: Peer) -> Quarantine:
        """Ends the connection at once, without the peer's help. Its open tickets fail with FENCED in the next poll.

        When it returns, no byte of that peer's earlier reads lands any more, but in what the quarantine names. Blocks,
        usually tens of milliseconds; other peers make progress meanwhile. Fencing again returns an empty quarantine,
        also where the first one was not.
        """
        ...

    def wake(self) -> None:
        """Makes a poll that runs, or else the next one, return. From any thread; after close it does nothing."""
        ...

    def close(self) -> None:
        """Ends all connections, telling the peers where possible within a second, and frees everything. Idempotent.
        Registered memory may be unmapped afterwards."""
        ...


MAX_SIGNAL_BYTES = 64 << 10


def is_rdma(lanes: Sequence[str]) -> bool:
    """Whether an RDMA transport was chosen."""
    return any(lane.split("/")[0].split("_")[0] in RDMA_TRANSPORTS for lane in lanes)


def merge_runs(rows: Rows) -> Rows:
    """The same bytes in as few rows as possible, in order of local address.

    rows: shape (N, 3), see Rows; empty rows are dropped. Neighbours are merged where local and remote ranges both
    touch. Local ranges must not overlap. Vectorised: about 0.1 ms for 1,000 rows.
    """
    rows = rows[rows[:, 2] > 0]
    if len(rows) < 2:
        return np.ascontiguousarray(rows)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    touches = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:]).all(axis=1)
    first = np.flatnonzero(np.concatenate(([True], ~touches)))
    merged = rows[first].copy()
    merged[:, 2] = np.add.reduceat(rows[:, 2], first)
    return merged


@dataclass(frozen=True, slots=True)
class Address:
    """What Transport.address packs. regions: (address, bytes, key)."""

    backend: str
    name: str
    payload: bytes
    regions: tuple[tuple[int, int, bytes], ...] = ()


_MAGIC = b"TSKV1"
_FIELD = struct.Struct("<I")
_REGION = struct.Struct("<QQ")


def pack_address(address: Address) -> bytes:
    """Length-prefixed fields behind a magic, and a checksum."""
    fields = [address.backend.encode(), address.name.encode(), address.payload]
    fields += [_REGION.pack(start, nbytes) + key for start, nbytes, key in address.regions]
    body = _MAGIC + b"".join(_FIELD.pack(len(field)) + field for field in fields)
    return body + _FIELD.pack(zlib.crc32(body))


def unpack_address(data: bytes, backend: str) -> Address:
    """Raises LayoutMismatchError when it is none, is damaged, or is of another backend."""
    body, checksum = data[:-4], data[-4:]
    if not body.startswith(_MAGIC) or checksum != _FIELD.pack(zlib.crc32(body)):
        raise LayoutMismatchError("the peer's transport address is damaged or of another version; run one version")
    fields, at = [], len(_MAGIC)
    while at < len(body):
        (size,) = _FIELD.unpack_from(body, at)
        fields.append(body[at + 4 : at + 4 + size])
        at += 4 + size
    if fields[0].decode() != backend:
        raise LayoutMismatchError(f"the peer moves KV with {fields[0].decode()}, this worker with {backend}; use one")
    regions = tuple((*_REGION.unpack_from(field), field[_REGION.size :]) for field in fields[3:])
    return Address(backend, fields[1].decode(), fields[2], regions)
