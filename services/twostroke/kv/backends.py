"""Which transport moves KV."""

from __future__ import annotations

from collections.abc import Mapping

from twostroke.errors import ConfigError
from twostroke.kv.transport import Transport

BACKENDS = ("ucx", "nixl")


def open_transport(
    backend: str, name: str, *, library: str = "", options: Mapping[str, str] | None = None
) -> Transport:
    """Opens one. library: path of libucp, for ucx. options: UCX settings without the UCX_ prefix.

    Raises ConfigError for an unknown backend, or one that is not installed or does not start.
    """
    if backend == "ucx":
        from twostroke.kv.ucx import UcxTransport

        return UcxTransport(name, library=library, options=options)
    if backend == "nixl":
        from twostroke.kv.nixl_agent import NixlTransport

        return NixlTransport(name, options=options)
    raise ConfigError(f"there is no transport {backend!r}; choose one of {', '.join(BACKENDS)}")
