"""The UCX backend: a thin native binding on libucp, found at run time.

Settings. `UCX_*` variables are UCX's own and are honoured, UCX_TLS and UCX_NET_DEVICES above all; `options` of the
constructor win over them. Four defaults are ours, unless the environment sets them: RNDV_THRESH=inf and
ADDRESS_VERSION=v2, without which UCX picks only tcp for endpoints with error handling, MAX_RMA_RAILS=2, and
TCP_CONN_NB=y, without which a connect to a host that is gone blocks all transfers for seconds.
Error handling of endpoints is always on. Transports that lack it are never chosen, and a UCX_TLS that names only such
fails at connect; posix and sysv have it only with UCX_POSIX_ERROR_HANDLING=y and UCX_SYSV_ERROR_HANDLING=y, and notice
a killed peer only by keepalive (20 s) then.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from twostroke.errors import ConfigError, EngineError, OverloadedError, UnavailableError, WorkerLostError
from twostroke.kv.transport import (
    MAX_SIGNAL_BYTES,
    Address,
    Event,
    Failure,
    Peer,
    PeerLost,
    PeerReady,
    Quarantine,
    Region,
    Rows,
    SignalReceived,
    Ticket,
    TicketDone,
    TicketFailed,
    pack_address,
    unpack_address,
)

DEFAULTS = {"RNDV_THRESH": "inf", "ADDRESS_VERSION": "v2", "MAX_RMA_RAILS": "2", "TCP_CONN_NB": "y"}
OLDEST_VERSION = (1, 16)
"""Before it, reads over tcp by endpoints with error handling are another, untested code path of UCX."""
WINDOW = 64
"""Reads in flight per peer, each of at most 4 MiB."""
FENCE_LIMIT_S = 1.0
FENCE_SETTLE_S = 0.05
CLOSE_LIMIT_S = 1.0

# As numbered in _ucx_worker.h.
_DONE, _FAILED, _READY, _LOST, _SIGNAL = range(5)
_FAILURES = (Failure.DEADLINE, Failure.PEER_LOST, Failure.FENCED, Failure.ERROR)


@dataclass(frozen=True, slots=True)
class Library:
    """A libucp that was loaded. source: which rule found it."""

    path: str
    version: tuple[int, int, int]
    source: str

    def __str__(self) -> str:
        return f"UCX {'.'.join(map(str, self.version))} ({self.source}: {self.path})"


def native() -> ModuleType:
    """The native extension. Raises ConfigError saying how to build it when the package was installed without."""
    try:
        return importlib.import_module("twostroke.kv._ucx")
    except ImportError as error:
        raise ConfigError(
            f"the native UCX binding is not built ({error}); install a C compiler and Python's headers "
            "(apt-get install gcc python3-dev) and install twostroke again, or choose the nixl transport"
        ) from None


def library_candidates(setting: str = "", folders: list[str] | None = None) -> Iterator[tuple[str, str]]:
    """(rule, name for the dynamic linker), the first to try first. folders: where Python packages lie; sys.path."""
    if setting:
        yield "setting", setting
        return
    yield "system", "libucp.so.0"
    roots = [Path(folder) for folder in (sys.path if folders is None else folders) if folder]
    for root in roots:
        yield from (("nixl wheel", str(path)) for path in sorted(root.glob("nixl_cu*.libs/libucp-*.so*")))
    for root in roots:
        yield from (("libucx wheel", str(path)) for path in sorted(root.glob("libucx/lib/libucp.so.0")))


def find_library(setting: str = "", folders: list[str] | None = None) -> Library:
    """Loads the first libucp that is new enough; it stays loaded.

    Raises ConfigError naming everything that was tried and what to install, or that the set one does not load.
    """
    module = native()
    tried = []
    for source, name in library_candidates(setting, folders):
        try:
            path, *version = module.load(name)
        except module.Error as error:
            tried.append(f"{name}: {error}")
            continue
        found = Library(path, (version[0], version[1], version[2]), source)
        if found.version[:2] >= OLDEST_VERSION:
            return found
        tried.append(f"{found} is older than {'.'.join(map(str, OLDEST_VERSION))}")
    raise ConfigError(
        "no UCX library was found; install one (pip install --no-deps nixl-cu12, pip install libucx-cu12, or the "
        f"system's libucx0) or name the path of libucp.so.0. Tried: {'; '.join(tried)}"
    )


class UcxTransport:
    """Transport over UCX. `fence` leaves nothing in quarantine when all operations ended within FENCE_LIMIT_S, which
    they did in every round of the soak test (docs/kv_transport.md); else exactly the ranges of those that did not.

    Over cma and RDMA lanes a read is a UCX GET, in which the source has no part. Over other lanes the source answers
    reads in its poll, and refuses those of memory that it has not registered; _ucx_worker.h says why.

    name: unique to this start of this worker. library: path of libucp; empty searches. direct: False reads by message
    over all lanes. options: UCX settings without the UCX_ prefix, such as {"TLS": "tcp"}. Raises ConfigError when the
    binding, the library or a setting is missing or wrong.
    """

    backend = "ucx"

    def __init__(
        self, name: str, *, library: str = "", direct: bool = True, options: Mapping[str, str] | None = None
    ) -> None:
        module = native()
        self.name = name
        self.library = find_library(library)
        self._error: type[Exception] = module.Error
        try:
            self._worker: Any = module.Worker(
                self.library.path, name.encode(), WINDOW, direct, DEFAULTS, dict(options or {})
            )
        except module.Error as error:
            raise ConfigError(f"{self.library} does not start: {error}; check UCX_TLS and UCX_NET_DEVICES") from None
        self._keys: dict[int, tuple[Region, bytes]] = {}
        self._peers: dict[str, Peer] = {}
        self._by_handle: dict[int, Peer] = {}
        self._fenced: list[int] = []
        self._tickets: dict[int, Ticket] = {}

    def register(self, address: int, nbytes: int) -> Region:
        try:
            handle, key = self._worker.register(address, nbytes)
        except self._error as error:
            raise EngineError(f"{nbytes} bytes at {address:#x} cannot be registered with UCX: {error}") from None
        region = Region(address, nbytes, handle)
        self._keys[handle] = region, key
        return region

    def address(self) -> bytes:
        regions = tuple((region.address, region.nbytes, key) for region, key in self._keys.values())
        return pack_address(Address(self.backend, self.name, self._call(self._worker.address), regions))

    def connect(self, peer_id: str, address: bytes, deadline_s: float = 5.0) -> Peer:
        if peer_id in self._peers:
            raise EngineError(f"{peer_id} is connected already; fence it before connecting again")
        remote = unpack_address(address, self.backend)
        try:
            handle = self._worker.connect(remote.payload, list(remote.regions), time.monotonic() + deadline_s)
        except self._error as error:
            raise UnavailableError(f"no UCX connection to {peer_id}: {error}; check UCX_TLS on both sides") from None
        peer = Peer(peer_id, handle)
        self._peers[peer_id] = self._by_handle[handle] = peer
        return peer

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self._call(self._worker.lanes, peer.handle)))

    def get_batch(self, peer: Peer, rows: Rows, deadline_s: float) -> Ticket:
        self._check_peer(peer)
        if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != np.int64:
            raise ValueError(f"rows are int64 of shape (N, 3), not {rows.dtype} of {rows.shape}")
        ticket_id = self._worker.get(peer.handle, np.ascontiguousarray(rows), time.monotonic() + deadline_s)
        ticket = Ticket(ticket_id, peer, int(rows[:, 2].sum()))
        self._tickets[ticket_id] = ticket
        return ticket

    def signal(self, peer: Peer, payload: bytes) -> None:
        self._check_peer(peer)
        if len(payload) > MAX_SIGNAL_BYTES:
            raise ValueError(f"a signal has at most {MAX_SIGNAL_BYTES} bytes, not {len(payload)}")
        try:
            self._worker.signal(peer.handle, payload)
        except self._error as error:
            kind = OverloadedError if "unsent" in str(error) else WorkerLostError
            raise kind(f"no signal to {peer.peer_id}: {error}") from None

    def poll(self, timeout_s: float) -> list[Event]:
        events = [self._event(*event) for event in self._call(self._worker.poll, timeout_s)]
        while self._fenced:
            del self._by_handle[self._fenced.pop()]
        return events

    def fence(self, peer: Peer) -> Quarantine:
        if self._peers.get(peer.peer_id) != peer:
            return Quarantine()
        del self._peers[peer.peer_id]
        self._fenced.append(peer.handle)
        return Quarantine(tuple(self._call(self._worker.fence, peer.handle, FENCE_LIMIT_S, FENCE_SETTLE_S)))

    def wake(self) -> None:
        self._worker.wake()

    def close(self) -> None:
        self._worker.close(CLOSE_LIMIT_S)
        self._peers.clear()
        self._tickets.clear()

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except self._error as error:
            raise EngineError(f"UCX: {error}") from None

    def _check_peer(self, peer: Peer) -> None:
        if self._peers.get(peer.peer_id) != peer:
            raise WorkerLostError(f"{peer.peer_id} is not connected")

    def _event(self, kind: int, *values: Any) -> Event:
        if kind == _SIGNAL:
            return SignalReceived(values[0].decode(), values[1])
        if kind == _DONE:
            return TicketDone(self._tickets.pop(values[0]))
        if kind == _FAILED:
            return TicketFailed(self._tickets.pop(values[0]), _FAILURES[values[1]], values[2])
        peer = self._by_handle[values[0]]
        return PeerReady(peer) if kind == _READY else PeerLost(peer, values[1])
