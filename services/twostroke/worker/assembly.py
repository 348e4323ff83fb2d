"""Puts a started engine behind its three services."""

from __future__ import annotations

import asyncio
import logging

from twostroke.config import WorkerSettings
from twostroke.engine.base import Engine, EngineInfo
from twostroke.errors import EngineError
from twostroke.rpc.server import Server
from twostroke.telemetry.scrape import ScrapeEndpoint
from twostroke.telemetry.tracing import Tracer
from twostroke.v1 import decode_pb2_grpc, prefill_pb2_grpc, worker_pb2_grpc
from twostroke.worker.decode_service import DecodeService
from twostroke.worker.host import EngineHost
from twostroke.worker.prefill_service import PrefillService
from twostroke.worker.traces import WorkerTraces
from twostroke.worker.worker_service import ROLES, WorkerService

log = logging.getLogger(__name__)

SERVICES = (
    "twostroke.v1.PrefillService",
    "twostroke.v1.DecodeService",
    "twostroke.v1.WorkerService",
)
DEADLINE_METHODS = frozenset(
    {
        "/twostroke.v1.PrefillService/Prefill",
        "/twostroke.v1.PrefillService/Release",
        "/twostroke.v1.WorkerService/GetInfo",
        "/twostroke.v1.WorkerService/ProbeLink",
        "/twostroke.v1.WorkerService/DropPeer",
        "/twostroke.v1.WorkerService/SetRole",
        "/twostroke.v1.WorkerService/Drain",
    }
)


class Worker:
    """A serving worker. tracer: writes its spans; the caller closes it."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Engine,
        info: EngineInfo,
        worker_id: str,
        epoch: str,
        tracer: Tracer | None = None,
    ) -> None:
        self._settings = settings
        self.host = EngineHost(engine, info, worker_id, epoch, stall_s=settings.stall_s)
        self._server = Server(settings.rpc, SERVICES, DEADLINE_METHODS)
        grpc_server = self._server.grpc
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(PrefillService(self.host), grpc_server)
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeService(self.host), grpc_server)
        service = WorkerService(self.host, ROLES[settings.role])
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(service, grpc_server)
        if tracer is not None:
            self.host.observers.append(WorkerTraces(tracer, worker_id))
        self._scrape = self._metrics(service) if settings.metrics else None

    def _metrics(self, service: WorkerService) -> ScrapeEndpoint:
        from twostroke.telemetry.metrics import Registry
        from twostroke.worker.metrics import WorkerMetrics

        registry, host = Registry(), self.host
        host.observers.append(WorkerMetrics(registry, host.worker_id, host.epoch, host.info, lambda: service.role))
        return ScrapeEndpoint(registry.render)

    async def listen(self) -> int:
        """Starts serving; returns the port. Raises ConfigError when it is taken."""
        port = await self._server.start(self._settings.host, self._settings.port)
        await self._server.set_ready(True)
        log.info(
            "%s (epoch %s) serves %s on %s:%d, role %s, %d KV blocks of %d tokens",
            self.host.worker_id,
            self.host.epoch,
            self.host.info.model,
            self._settings.host,
            port,
            self._settings.role,
            self.host.info.total_blocks,
            self.host.info.layout.block_size_tokens,
        )
        return port

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains. Raises EngineError when the engine is lost."""
        if self._scrape is not None:
            await self._scrape.start(self._settings.host, self._settings.metrics_port)
        await self.listen()
        steps = asyncio.create_task(self.host.run(), name="engine steps")
        watch = asyncio.create_task(self.host.watch_steps(self._server.set_ready), name="step watch")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        asked = asyncio.create_task(self.host.draining.wait(), name="drain")
        try:
            await asyncio.wait({steps, stopping, asked}, return_when=asyncio.FIRST_COMPLETED)
            if steps.done():
                steps.result()
                raise EngineError("the step loop ended by itself")
            log.info("draining: %d requests run", self.host.active_requests)
            await self._server.set_ready(False)
            await self.host.drain(self._settings.drain_s)
        finally:
            stopping.cancel()
            watch.cancel()
            asked.cancel()
            await self._server.drain(0.5)
            if self._scrape is not None:
                await self._scrape.close()
            steps.cancel()
            await asyncio.gather(steps, watch, stopping, asked, return_exceptions=True)
