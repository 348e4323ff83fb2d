"""Building, serving and draining a gRPC server with health and reflection."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twostroke.config import RpcSettings
from twostroke.errors import ConfigError
from twostroke.rpc.health import HealthServicer
from twostroke.rpc.interceptors import BoundaryInterceptor, Guard
from twostroke.rpc.options import server_options
from twostroke.rpc.tls import server_credentials
from twostroke.rpc.trace_context import TraceContextInterceptor

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_HANDLERS_END_S = 2.0


class Server:
    """A gRPC server with grpc.health.v1 and reflection.

    Health: the empty name is liveness and serves from `start` to the end of `drain`; each service name is readiness and
    follows `set_ready`. Register services on `grpc` before `start`. guard: looks at every call of those services.
    """

    def __init__(
        self,
        settings: RpcSettings,
        services: Sequence[str],
        deadline_methods: frozenset[str],
        guard: Guard | None = None,
    ) -> None:
        self._settings = settings
        self._boundary = BoundaryInterceptor(deadline_methods, guard)
        self.grpc = grpc.aio.server(
            interceptors=[TraceContextInterceptor(), self._boundary],
            options=server_options(settings),
        )
        self._services = tuple(services)
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    async def start(self, host: str, port: int, flag: str = "--port") -> int:
        """Listens and serves; returns the port. Raises ConfigError naming the flag when the port is taken, and for
        certificates that cannot be used."""
        bracketed = f"[{host}]" if ":" in host else host
        credentials = server_credentials(self._settings)
        try:
            if credentials is None:
                bound = self.grpc.add_insecure_port(f"{bracketed}:{port}")
            else:
                bound = self.grpc.add_secure_port(f"{bracketed}:{port}", credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {bracketed}:{port}: the port is taken or the address is not this machine's; "
                f"choose another with {flag}"
            ) from error
        for service in self._services:
            await self._health.set(service, _NOT_SERVING)
        await self._health.set("", _SERVING)
        await self.grpc.start()
        return bound

    async def set_ready(self, ready: bool) -> None:
        """Sets the readiness of all services."""
        for service in self._services:
            await self._health.set(service, _SERVING if ready else _NOT_SERVING)

    async def drain(self, grace_s: float) -> None:
        """Says NOT_SERVING, takes no new calls, gives running ones grace_s and ends the rest."""
        await self._health.enter_graceful_shutdown()
        await self.grpc.stop(grace_s)
        await self._boundary.ended(_HANDLERS_END_S)
