"""The NIXL backend: the agent API of the nixl package behind the same interface, as far as it reaches.

It differs from UCX in what NIXL cannot do:
  - A read that was given up may land later, whatever is released (docs/kv_transport.md), so fence returns the memory of
    all unfinished reads as quarantine, until close.
  - There is no descriptor to sleep on. Its progress thread would spin on a core, so it is off and poll makes the
    progress: every BUSY_S while reads are open, else every IDLE_S. A source over tcp answers no faster than that.
  - Over shared memory get_batch copies everything before it returns, so a deadline cannot cut it short.
  - Lanes cannot be asked for. A dead peer is noticed by the next read or signal only.
"""

from __future__ import annotations

import importlib
import importlib.util
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from twostroke.config import set_environment
from twostroke.errors import ConfigError, EngineError, UnavailableError, WorkerLostError
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

BUSY_S = 0.0002
IDLE_S = 0.002
_LOCAL = "NIXL_INIT_AGENT"


@dataclass(slots=True)
class _Read:
    """An open ticket. handle: None when it was never posted."""

    ticket: Ticket
    rows: Rows
    deadline: float
    handle: Any = None
    state: str = "PROC"
    message: str = ""


def nixl_api() -> ModuleType:
    """NIXL's Python interface. Raises ConfigError naming what to install."""
    builds = [name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name)]
    try:
        # The meta package chooses between builds, and imports torch to do so.
        return importlib.import_module(f"{builds[0] if len(builds) == 1 else 'nixl'}._api")
    except ImportError as error:
        raise ConfigError(
            f"NIXL is not installed ({error}); pip install --no-deps nixl nixl-cu12, or choose the ucx transport"
        ) from None


class NixlTransport:
    """Transport over a NIXL agent with its UCX backend.

    options: UCX settings without the UCX_ prefix. NIXL passes none on, so they are set in this process's environment
    and hold for its later agents too. progress_thread: for comparisons; it spins on a core. Raises ConfigError when
    NIXL is missing or does not start.
    """

    backend = "nixl"

    def __init__(self, name: str, *, options: Mapping[str, str] | None = None, progress_thread: bool = False) -> None:
        api = nixl_api()
        self.name = name
        set_environment(**{f"UCX_{key}": value for key, value in (options or {}).items()})
        try:
            config = api.nixl_agent_config(enable_prog_thread=progress_thread, backends=[])
            self._agent = api.nixl_agent(name, config)
            self._agent.create_backend("UCX", {})
        except Exception as error:
            raise ConfigError(f"NIXL's UCX backend does not start: {error}; check UCX_TLS") from error
        self._woken = threading.Event()
        self._registered: list[Any] = []
        self._peers: dict[str, tuple[Peer, str]] = {}
        self._lost: set[int] = set()
        self._reads: list[_Read] = []
        self._events: list[Event] = []
        self._last_id = 0

    def register(self, address: int, nbytes: int) -> Region:
        self._open_agent()
        try:
            handle = self._agent.register_memory([(address, nbytes, 0, "")], "DRAM")
        except Exception as error:
            raise EngineError(f"{nbytes} bytes at {address:#x} cannot be registered with NIXL: {error}") from error
        self._registered.append(handle)
        return Region(address, nbytes, self._next_id())

    def address(self) -> bytes:
        return pack_address(Address(self.backend, self.name, self._open_agent().get_agent_metadata()))

    def connect(self, peer_id: str, address: bytes, deadline_s: float = 5.0) -> Peer:
        del deadline_s  # NIXL connects with the first read
        if peer_id in self._peers:
            raise EngineError(f"{peer_id} is connected already; fence it before connecting again")
        remote = unpack_address(address, self.backend)
        try:
            agent_name = self._open_agent().add_remote_agent(remote.payload)
        except Exception as error:
            raise UnavailableError(f"no NIXL connection to {peer_id}: {error}") from error
        peer = Peer(peer_id, self._next_id())
        name = agent_name.decode() if isinstance(agent_name, bytes) else agent_name
        self._peers[peer_id] = peer, name
        self._events.append(PeerReady(peer))
        return peer

    def lanes(self, peer: Peer) -> tuple[str, ...]:
        del peer
        return ()

    def get_batch(self, peer: Peer, rows: Rows, deadline_s: float) -> Ticket:
        agent_name = self._agent_of(peer)
        if rows.ndim != 2 or rows.shape[1] != 3 or rows.dtype != np.int64:
            raise ValueError(f"rows are int64 of shape (N, 3), not {rows.dtype} of {rows.shape}")
        ticket = Ticket(self._next_id(), peer, int(rows[:, 2].sum()))
        read = _Read(ticket, rows.copy(), time.monotonic() + deadline_s)
        if len(rows) == 0:
            read.state = "DONE"
        elif deadline_s > 0:
            self._post(read, agent_name)
        self._reads.append(read)
        return ticket

    def _post(self, read: _Read, agent_name: str) -> None:
        zeros = np.zeros(len(read.rows), dtype=np.int64)
        sides = []
        try:
            for column, owner in ((0, _LOCAL), (1, agent_name)):
                table = np.stack([read.rows[:, column], read.rows[:, 2], zeros], axis=1).astype(np.uint64)
                sides.append(self._agent.prep_xfer_dlist(owner, table, "DRAM"))
        except Exception as error:
            raise ValueError(f"a row of the batch is not registered memory: {error}") from error
        index = np.arange(len(read.rows), dtype=np.int32)
        try:
            read.handle = self._agent.make_prepped_xfer("READ", sides[0], index, sides[1], index)
            read.state = self._agent.transfer(read.handle)
        except Exception as error:
            read.state, read.message = "ERR", f"{type(error).__name__} {error}".strip()
        for side in sides:
            self._agent.release_dlist_handle(side)

    def signal(self, peer: Peer, payload: bytes) -> None:
        agent_name = self._agent_of(peer)
        if len(payload) > MAX_SIGNAL_BYTES:
            raise ValueError(f"a signal has at most {MAX_SIGNAL_BYTES} bytes, not {len(payload)}")
        try:
            self._agent.send_notif(agent_name, payload)
        except Exception as error:
            self._lose(peer, f"{type(error).__name__} {error}".strip())
            raise WorkerLostError(f"no signal to {peer.peer_id}: {error}") from error

    def poll(self, timeout_s: float) -> list[Event]:
        self._open_agent()
        end = time.monotonic() + timeout_s
        while True:
            for sender, payloads in self._agent.get_new_notifs().items():
                name = sender.decode() if isinstance(sender, bytes) else sender
                self._events += [SignalReceived(name, bytes(payload)) for payload in payloads]
            self._reads = [read for read in self._reads if not self._over(read)]
            left = end - time.monotonic()
            if self._events or left <= 0:
                break
            if self._woken.wait(min(left, BUSY_S if self._reads else IDLE_S)):
                break
        self._woken.clear()
        events, self._events = self._events, []
        return events

    def _over(self, read: _Read) -> bool:
        """Whether the read ended, with its event queued. One that failed stays for the fence."""
        if read.state == "FAILED":
            return False
        if read.state == "PROC" and read.handle is not None:
            try:
                read.state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                read.state, read.message = "ERR", f"{type(error).__name__} {error}".strip()
        if read.state == "DONE":
            if read.handle is not None:
                self._agent.release_xfer_handle(read.handle)
            self._events.append(TicketDone(read.ticket))
            return True
        if read.state == "ERR":
            gone = "Disconnect" in read.message
            self._fail(read, Failure.PEER_LOST if gone else Failure.ERROR, read.message or "NIXL says ERR")
            if gone:
                self._lose(read.ticket.peer, read.message)
        elif time.monotonic() >= read.deadline:
            self._fail(read, Failure.DEADLINE, "not complete by its deadline")
        return False

    def _fail(self, read: _Read, failure: Failure, message: str) -> None:
        read.state = "FAILED"
        self._events.append(TicketFailed(read.ticket, failure, message))

    def fence(self, peer: Peer) -> Quarantine:
        if self._peers.get(peer.peer_id, (None,))[0] != peer:
            return Quarantine()
        ranges: list[tuple[int, int]] = []
        for read in [read for read in self._reads if read.ticket.peer == peer]:
            self._reads.remove(read)
            if read.state not in ("FAILED", "ERR"):
                self._fail(read, Failure.FENCED, "given up")
            if read.handle is not None:
                ranges += [(int(local), int(nbytes)) for local, _, nbytes in read.rows.tolist()]
                self._quietly(self._agent.release_xfer_handle, read.handle)
        _, agent_name = self._peers.pop(peer.peer_id)
        self._lost.discard(peer.handle)
        self._quietly(self._agent.remove_remote_agent, agent_name)
        return Quarantine(tuple(ranges))

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        if self._agent is None:
            return
        for peer, _ in list(self._peers.values()):
            self.fence(peer)
        for handle in self._registered:
            self._quietly(self._agent.deregister_memory, handle)
        self._agent = None

    def _quietly(self, method: Any, *arguments: Any) -> None:
        """NIXL refuses to release what is in flight; nothing more can be done about it here."""
        try:
            method(*arguments)
        except Exception as error:
            del error

    def _lose(self, peer: Peer, message: str) -> None:
        if peer.handle not in self._lost:
            self._lost.add(peer.handle)
            self._events.append(PeerLost(peer, message))

    def _agent_of(self, peer: Peer) -> str:
        self._open_agent()
        known, agent_name = self._peers.get(peer.peer_id, (None, ""))
        if known != peer or peer.handle in self._lost:
            raise WorkerLostError(f"{peer.peer_id} is not connected")
        return agent_name

    def _open_agent(self) -> Any:
        if self._agent is None:
            raise EngineError("NIXL: the transport is closed")
        return self._agent

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id
