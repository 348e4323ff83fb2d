"""Certificates of gRPC servers and channels."""

from __future__ import annotations

import grpc

from twostroke.config import RpcSettings, read_file
from twostroke.errors import ConfigError


def server_credentials(settings: RpcSettings) -> grpc.ServerCredentials | None:
    """None for a server without TLS. Raises ConfigError for a file that cannot be read or is missing."""
    if not settings.tls_cert:
        return None
    authority = read_file("--rpc-tls-ca", settings.tls_ca) if settings.tls_ca else None
    verify = authority is not None and settings.tls_verify_clients
    return grpc.ssl_server_credentials([_own(settings)], authority if verify else None, verify)


def channel_credentials(settings: RpcSettings) -> grpc.ChannelCredentials | None:
    """None for a channel without TLS. Raises ConfigError for a file that cannot be read or is missing."""
    if not settings.tls_ca:
        return None
    authority = read_file("--rpc-tls-ca", settings.tls_ca)
    key, certificate = _own(settings) if settings.tls_cert else (None, None)
    return grpc.ssl_channel_credentials(authority, key, certificate)


def _own(settings: RpcSettings) -> tuple[bytes, bytes]:
    if not settings.tls_key:
        raise ConfigError("--rpc-tls-cert needs --rpc-tls-key, the key of that certificate")
    return read_file("--rpc-tls-key", settings.tls_key), read_file("--rpc-tls-cert", settings.tls_cert)
