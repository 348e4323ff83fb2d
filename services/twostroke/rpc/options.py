"""Channel arguments, the same on both sides.

A peer that is stopped but not dead (SIGSTOP, a paused virtual machine) still has a kernel that acknowledges, so gRPC's
keepalive alone never notices it; `grpc.http2.ping_timeout_ms` does. gRPC ignores a misspelt argument silently, so the
tests check the behaviour and not the names.
"""

from __future__ import annotations

from twostroke.config import RpcSettings

Options = list[tuple[str, int | str]]


def _common(settings: RpcSettings) -> Options:
    return [
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        ("grpc.keepalive_time_ms", int(settings.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(settings.keepalive_timeout_s * 1000)),
        ("grpc.http2.ping_timeout_ms", int(settings.ping_timeout_s * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def channel_options(settings: RpcSettings) -> Options:
    """Arguments of every client channel."""
    return [
        *_common(settings),
        ("grpc.initial_reconnect_backoff_ms", int(settings.reconnect_min_s * 1000)),
        # Also the time that one attempt to connect gets, so it must not be as short as the back-off.
        ("grpc.min_reconnect_backoff_ms", int(settings.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(settings.reconnect_max_s * 1000)),
        # Retries are decided by the router and the SDK, which know whether a token was delivered.
        ("grpc.enable_retries", 0),
        *([("grpc.ssl_target_name_override", settings.tls_server_name)] if settings.tls_server_name else []),
    ]


def server_options(settings: RpcSettings) -> Options:
    """Arguments of every server."""
    return [
        *_common(settings),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        # Otherwise a second server on the same port starts without an error and takes half of the traffic.
        ("grpc.so_reuseport", 0),
    ]
