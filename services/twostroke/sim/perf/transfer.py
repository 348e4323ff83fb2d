"""How long a hand-off of KV takes, and how much of it a request waits for.

    time = t0 + bytes / (efficiency * links * bandwidth) + descriptors * time per descriptor

When chunks are sent while prefill still runs, only what is left after its last chunk is exposed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class TransferModel:
    """A link between a prefill and a decode worker.

    base_s: of any transfer. links, link_bytes_per_s: as stated on the datasheet. efficiency: share of it that is
    reached. descriptor_s: of each contiguous range; 0 where ranges are merged or posted in parallel.
    """

    base_s: float = 1.5e-3
    links: int = 1
    link_bytes_per_s: float = 50e9
    efficiency: float = 0.82
    descriptor_s: float = 0.0

    def transfer_s(self, size_bytes: float, descriptors: int = 1) -> float:
        """Seconds of one transfer on an idle link."""
        rate = self.efficiency * self.links * self.link_bytes_per_s
        return self.base_s + size_bytes / rate + descriptors * self.descriptor_s

    def exposed_s(self, chunk_bytes: Sequence[float], chunk_ready_s: Sequence[float], descriptors: int = 1) -> float:
        """Seconds between the end of prefill and the end of the transfer.

        chunk_bytes, chunk_ready_s: of each chunk in order; prefill ends when the last is ready. descriptors: per chunk.
        A chunk is sent when it is ready and the one before has been sent. With one chunk all of it is exposed.
        """
        free_s = 0.0
        for size, ready_s in zip(chunk_bytes, chunk_ready_s, strict=True):
            free_s = max(free_s, ready_s) + self.transfer_s(size, descriptors)
        return free_s - chunk_ready_s[-1]

    def shared(self, transfers: int) -> TransferModel:
        """The same link as each of so many transfers at once sees it: bandwidth is shared, latency is not."""
        return TransferModel(
            self.base_s, self.links, self.link_bytes_per_s / max(transfers, 1), self.efficiency, self.descriptor_s
        )


def fit(sizes_bytes: Sequence[float], seconds: Sequence[float], links: int, link_bytes_per_s: float) -> TransferModel:
    """The two parameters, base and efficiency, that fit measured transfers best by relative error.

    At least two different sizes. The base is at least 0 and the efficiency at most 1.
    """
    sizes, measured = np.asarray(sizes_bytes, float), np.asarray(seconds, float)
    design = np.stack([np.ones_like(sizes), sizes / (links * link_bytes_per_s)], axis=1) / measured[:, None]
    base_s, inverse = np.linalg.lstsq(design, np.ones_like(measured), rcond=None)[0]
    return TransferModel(max(float(base_s), 0.0), links, link_bytes_per_s, min(1 / max(float(inverse), 1e-9), 1.0))


@dataclass(frozen=True, slots=True)
class MeasuredTransfers:
    """A published table: hand-offs of one model over one kind of link, one prefill worker to one decode worker."""

    name: str
    kv_bytes_per_token: float
    links: int
    link_bytes_per_s: float
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def sizes_bytes(self) -> tuple[float, ...]:
        """Of each transfer."""
        return tuple(tokens * self.kv_bytes_per_token for tokens in self.tokens)

    def fit(self) -> TransferModel:
        """The model that fits this table."""
        return fit(self.sizes_bytes(), self.seconds, self.links, self.link_bytes_per_s)


MOONCAKE_TABLES = (
    MeasuredTransfers(
        "Qwen3-235B bf16, H20, 4 x 400 Gb/s",
        94 * 2 * 4 * 128 * 2,
        4,
        50e9,
        (1024, 8192, 16384, 32768),
        (3.96e-3, 20.3e-3, 39.1e-3, 76.8e-3),
    ),
    MeasuredTransfers(
        "Qwen3-8B bf16, H800, 8 x CX-7, 200 GB/s stated",
        36 * 2 * 8 * 128 * 2,
        8,
        25e9,
        (1024, 8192, 32768),
        (1.5e-3, 8.8e-3, 31.7e-3),
    ),
)
"""From the performance pages of Mooncake's documentation (kvcache-ai/Mooncake, Apache-2.0)."""
