"""The books of a router: every live hand-off, where it stands, and what has to be said to whom when that changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum


class HandoffState(Enum):
    """Where a hand-off stands."""

    OFFERED = "offered"
    """The source holds it, or computes it, and nobody fetches it."""
    RECEIVING = "receiving"
    """A decode worker fetches it."""
    RECEIVED = "received"
    """It was read; the source has been told, and the answer is being written."""
    RELEASED = "released"
    """It is over, and the source was told so."""
    LOST = "lost"
    """Its source's epoch ended before it was read."""


@dataclass(frozen=True, slots=True)
class Life:
    """One life of a worker, from its start to its end."""

    worker: str
    """Key of the worker."""
    worker_id: str
    epoch: str


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the source that nobody needs the hand-off any more."""

    source: Life
    handoff_id: str


@dataclass(frozen=True, slots=True)
class DropPeer:
    """Tell a worker that a life which it exchanged KV with is over."""

    to: Life
    ended: Life


Action = Release | DropPeer


@dataclass(slots=True)
class _Entry:
    source: Life
    state: HandoffState = HandoffState.OFFERED
    destination: Life | None = None


class Ledger:
    """Says Release exactly once per hand-off that was offered, and DropPeer once per pair of lives.

    Ids that are not in the books are ignored: what is said of a hand-off after its end changes nothing.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._peers: dict[Life, set[Life]] = {}
        self._over: Counter[HandoffState] = Counter()

    def offer(self, handoff_id: str, source: Life) -> None:
        """A prefill worker was asked for a hand-off, and may hold KV for it from now on."""
        self._entries[handoff_id] = _Entry(source)

    def receive(self, handoff_id: str, destination: Life) -> None:
        """A decode worker was told to fetch it; the first one, or another one after that."""
        entry = self._entries.get(handoff_id)
        if entry is None or entry.state not in (HandoffState.OFFERED, HandoffState.RECEIVING):
            return
        entry.state, entry.destination = HandoffState.RECEIVING, destination
        self._peers.setdefault(entry.source, set()).add(destination)
        self._peers.setdefault(destination, set()).add(entry.source)

    def refused(self, handoff_id: str) -> None:
        """The decode worker will not fetch it; the source has it still."""
        entry = self._entries.get(handoff_id)
        if entry is not None and entry.state is HandoffState.RECEIVING:
            entry.state, entry.destination = HandoffState.OFFERED, None

    def received(self, handoff_id: str) -> Sequence[Action]:
        """The decode worker has read it."""
        entry = self._entries.get(handoff_id)
        if entry is None or entry.state is not HandoffState.RECEIVING:
            return ()
        entry.state = HandoffState.RECEIVED
        return (Release(entry.source, handoff_id),)

    def close(self, handoff_id: str, *, source_lost: bool = False) -> Sequence[Action]:
        """Its request, or the attempt at it, is over. source_lost: because the source went away."""
        entry = self._entries.pop(handoff_id, None)
        if entry is None:
            return ()
        if entry.state is not HandoffState.LOST:
            lost = source_lost and entry.state is not HandoffState.RECEIVED
            self._over[HandoffState.LOST if lost else HandoffState.RELEASED] += 1
        # A source that was taken for gone may turn out not to be, and would hold what is lost until its lease ends.
        return () if entry.state is HandoffState.RECEIVED else (Release(entry.source, handoff_id),)

    def absent(self, handoff_id: str) -> None:
        """The first token ended the answer: there is nothing to hand over, and nothing is held."""
        self._entries.pop(handoff_id, None)

    def ended(self, life: Life) -> Sequence[Action]:
        """A worker's life is over: what it held is lost, what it fetched is on offer again, and its peers are told."""
        for entry in self._entries.values():
            if entry.source == life and entry.state in (HandoffState.OFFERED, HandoffState.RECEIVING):
                entry.state = HandoffState.LOST
                self._over[HandoffState.LOST] += 1
            elif entry.destination == life and entry.state is HandoffState.RECEIVING:
                entry.state, entry.destination = HandoffState.OFFERED, None
        peers = self._peers.pop(life, set())
        for peer in peers:
            self._peers[peer].discard(life)
        return [DropPeer(peer, life) for peer in sorted(peers, key=lambda peer: peer.worker)]

    def state(self, handoff_id: str) -> HandoffState | None:
        """Where a live hand-off stands; None for one that is over."""
        entry = self._entries.get(handoff_id)
        return entry.state if entry is not None else None

    def counts(self) -> Mapping[HandoffState, int]:
        """How many are in each state now; of RELEASED and LOST, how many ever were."""
        live = Counter(entry.state for entry in self._entries.values())
        live[HandoffState.LOST] = 0
        return live + self._over
