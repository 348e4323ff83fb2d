"""Client channels."""

from __future__ import annotations

import grpc
import grpc.aio

from twostroke.config import RpcSettings
from twostroke.rpc.options import channel_options


def connect(target: str, settings: RpcSettings) -> grpc.aio.Channel:
    """An asyncio channel to host:port. Connects on first use and again after every loss; close it when done."""
    return grpc.aio.insecure_channel(target, options=channel_options(settings))


def connect_sync(target: str, settings: RpcSettings) -> grpc.Channel:
    """A blocking channel to host:port, for callers without an event loop."""
    return grpc.insecure_channel(target, options=channel_options(settings))
