"""Trying a link: reads a known pattern out of another rank's memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from twostroke.errors import KvCorruptError, TwostrokeError, WorkerLostError
from twostroke.kv.link import LinkReport
from twostroke.kv.transport import is_rdma
from twostroke.v1.kv_pb2 import KvMemory

if TYPE_CHECKING:
    from twostroke.kv.callbacks import Fetch

PROBE_BYTES = 1 << 20
SMALL_BYTES = 64

Bytes = npt.NDArray[np.uint8]


def pattern(name: str) -> Bytes:
    """What the rank of this name has in its probe memory."""
    return np.frombuffer(hashlib.shake_256(name.encode()).digest(PROBE_BYTES), np.uint8)


class Probe:
    """Tries one link: a small read, then a large one. `over` is told the report or the error, once.

    target: PROBE_BYTES of registered memory. lanes: what the transport chose, asked when the reads are done.
    """

    def __init__(
        self,
        source: str,
        remote: KvMemory,
        target: Bytes,
        fetch: Fetch,
        clock: Callable[[], float],
        lanes: Callable[[], tuple[str, ...]],
        over: Callable[[LinkReport | TwostrokeError], None],
        *,
        timeout_s: float,
    ) -> None:
        self.source = source
        self._remote = remote
        self._target = target
        self._fetch = fetch
        self._clock = clock
        self._lanes = lanes
        self._over: Callable[[LinkReport | TwostrokeError], None] | None = over
        self._timeout_s = timeout_s
        self._latency_ms = 0.0

    def run(self) -> None:
        """Begins; the source is connected, or about to be."""
        self._target[:] = 0
        # The first one waits for the connection, and is not timed.
        self._read(SMALL_BYTES, lambda _: self._read(SMALL_BYTES, self._measured_small))

    def fail(self, error: TwostrokeError) -> None:
        """The link does not work."""
        self._end(error)

    def _measured_small(self, duration_s: float) -> None:
        self._latency_ms = duration_s * 1e3
        self._read(min(PROBE_BYTES, self._remote.probe_bytes), self._measured_large)

    def _measured_large(self, duration_s: float) -> None:
        if not np.array_equal(self._target, pattern(self.source)):
            self._end(KvCorruptError(f"the probe of {self.source} brought wrong bytes; check its lanes with UCX_TLS"))
            return
        lanes = self._lanes()
        self._end(LinkReport(lanes, is_rdma(lanes), PROBE_BYTES / max(duration_s, 1e-9), self._latency_ms))

    def _read(self, nbytes: int, then: Callable[[float], None]) -> None:
        begun_s = self._clock()

        def over(refused: str | None) -> None:
            if refused is not None:
                self._end(WorkerLostError(f"the probe of {self.source} was refused: {refused}"))
            elif self._over is not None:
                then(self._clock() - begun_s)

        rows = np.array([[self._target.ctypes.data, self._remote.probe_address, nbytes]], np.int64)
        if not self._fetch(self.source, rows, self._timeout_s, over):
            self._end(WorkerLostError(f"{self.source} is not connected"))

    def _end(self, outcome: LinkReport | TwostrokeError) -> None:
        over, self._over = self._over, None
        if over is not None:
            over(outcome)
