"""KV on its way from prefill to decode: which chunks may go, and when the links are free for them."""

from __future__ import annotations

from twostroke.sim.clock import exact
from twostroke.sim.fleet import Fleet
from twostroke.sim.worker import Flight


class Handoffs:
    """Times of transfers. A chunk goes when it is computed, decode has blocks for it, and both ports are free."""

    def __init__(self, fleet: Fleet) -> None:
        self._link = fleet.link
        self._start_s = exact(fleet.link.start_s)
        self._bytes_per_token = fleet.kv_bytes_per_token
        self.bytes = 0.0

    def pull(self, flight: Flight, now_s: float) -> float | None:
        """Sends what is computed and was not sent; returns when all of the prompt will be there, once that is known.

        Decode must have blocks.
        """
        tokens = flight.computed - flight.pulled
        end_s = now_s
        if tokens > 0:
            prefill = flight.prefill
            assert prefill is not None
            out, into = prefill.outgress, flight.decode.ingress
            start_s = max(now_s, out.free_s, into.free_s)
            end_s = start_s + exact(self._duration_s(tokens, prefill.kind.limits.block_tokens))
            out.free_s = into.free_s = end_s
            flight.pulled = flight.computed
        if not flight.done:
            return None
        return end_s + self._start_s

    def _duration_s(self, tokens: int, block_tokens: int) -> float:
        link = self._link
        sent_bytes = tokens * self._bytes_per_token
        self.bytes += sent_bytes
        descriptors = -(-tokens // block_tokens) * link.descriptors_per_block
        return sent_bytes / link.bytes_per_s + descriptors * link.descriptor_s
