"""Client channels."""

from __future__ import annotations

import grpc
import grpc.aio

from twostroke.config import RpcSettings
from twostroke.rpc.options import channel_options
from twostroke.rpc.tls import channel_credentials


def connect(target: str, settings: RpcSettings) -> grpc.aio.Channel:
    """An asyncio channel to host:port, with TLS where the settings name a CA. Close it when done.

    Connects on first use and again after every loss. Raises ConfigError for certificates that cannot be read.
    """
    credentials, options = channel_credentials(settings), channel_options(settings)
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=options)
    return grpc.aio.secure_channel(target, credentials, options=options)


def connect_sync(target: str, settings: RpcSettings) -> grpc.Channel:
    """A blocking channel to host:port, for callers without an event loop. Otherwise as `connect`."""
    credentials, options = channel_credentials(settings), channel_options(settings)
    if credentials is None:
        return grpc.insecure_channel(target, options=options)
    return grpc.secure_channel(target, credentials, options=options)
