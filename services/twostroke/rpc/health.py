"""grpc.health.v1 whole: the stock asyncio servicer, and List, which it lacks."""

from __future__ import annotations

from typing import Any

from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the library is not typed
    """Check and Watch are the library's; `set` remembers what List answers."""

    def __init__(self) -> None:
        super().__init__()
        self._listed: dict[str, int] = {}

    async def set(self, service: str, status: int) -> None:
        """Sets the health of a service."""
        self._listed[service] = status
        await super().set(service, status)

    async def List(self, request: health_pb2.HealthListRequest, context: Any) -> health_pb2.HealthListResponse:  # noqa: N802
        """The health of every service."""
        statuses = {name: health_pb2.HealthCheckResponse(status=status) for name, status in self._listed.items()}
        return health_pb2.HealthListResponse(statuses=statuses)
