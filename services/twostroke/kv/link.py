"""What reading from another worker's memory was found to do."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkReport:
    """The outcome of a probe."""

    lanes: tuple[str, ...] = ()
    """The transports in use; empty when the connector cannot tell."""
    rdma: bool = False
    bytes_per_s: float = 0.0
    """0 when nothing was read."""
    latency_ms: float = 0.0
