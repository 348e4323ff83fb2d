"""What the two ends of hand-offs need of the thread that runs them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from twostroke.kv.digest import Ranges
from twostroke.kv.transport import Rows
from twostroke.v1.transfer_pb2 import TransferSignal

Send = Callable[[str, TransferSignal], None]
"""Sends a signal to a peer by name; lost when the peer is."""

DigestOf = Callable[[Ranges], bytes]
"""The digest of what lies in memory."""


class Fetch(Protocol):
    """Posts a read of rows from a source, by name. `over` is called when it is complete, with a message when it was
    refused; it is not called when the source is lost, which `Reader.lost` tells. Returns False when the source is not
    connected; nothing was posted then."""

    def __call__(self, source: str, rows: Rows, deadline_s: float, over: Callable[[str | None], None], /) -> bool: ...
