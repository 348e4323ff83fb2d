"""The ledger at work: what happens to hand-offs is booked, and what the books say is sent."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from twostroke.policy.ledger import Action, HandoffState, Ledger, Life, Release
from twostroke.router.member import Member

log = logging.getLogger(__name__)


class Handoffs:
    """All live hand-offs of a router. member: the worker at an address, if it is still known."""

    def __init__(self, member: Callable[[str], Member | None]) -> None:
        self._member = member
        self._ledger = Ledger()

    def offer(self, handoff_id: str, source: Member) -> None:
        """A prefill worker is asked for it."""
        self._ledger.offer(handoff_id, source.life)

    def receive(self, handoff_id: str, destination: Member) -> None:
        """A decode worker is told to fetch it."""
        self._ledger.receive(handoff_id, destination.life)

    def refused(self, handoff_id: str) -> None:
        """The decode worker was told to stop, or failed; nothing changes when it had read it."""
        self._ledger.refused(handoff_id)

    def received(self, handoff_id: str) -> None:
        """The decode worker has read it; the source may free it."""
        self._carry_out(self._ledger.received(handoff_id))

    def absent(self, handoff_id: str) -> None:
        """There is nothing to hand over."""
        self._ledger.absent(handoff_id)

    def close(self, handoff_id: str, *, source_lost: bool) -> None:
        """The attempt is over, maybe because the source went away; the source is told unless it knows."""
        self._carry_out(self._ledger.close(handoff_id, source_lost=source_lost))

    def ended(self, life: Life) -> None:
        """A worker's life is over; whoever exchanged KV with it is told."""
        log.info("epoch %s of worker %s is over", life.epoch, life.worker_id)
        self._carry_out(self._ledger.ended(life))

    def was_received(self, handoff_id: str) -> bool:
        """Whether it was read, so that the source holds it no more."""
        return self._ledger.state(handoff_id) is HandoffState.RECEIVED

    def counts(self) -> Mapping[HandoffState, int]:
        """How many are in each state; see Ledger.counts."""
        return self._ledger.counts()

    def _carry_out(self, actions: Sequence[Action]) -> None:
        for action in actions:
            life = action.source if isinstance(action, Release) else action.to
            member = self._member(life.worker)
            if member is None or member.life != life:
                continue
            if isinstance(action, Release):
                member.release(action.handoff_id)
            else:
                member.drop_peer(action.ended.worker_id, action.ended.epoch)
