"""Puts a dispatcher behind the router's edges, in the order that lets a caller see what is still missing."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from twostroke.config import RouterSettings
from twostroke.router.access import Access
from twostroke.router.cluster_service import ClusterService
from twostroke.router.dispatch import Dispatcher
from twostroke.router.front_end import PlainFrontEnd
from twostroke.router.grpc_edge import InferenceService
from twostroke.router.observer import RequestObserver
from twostroke.rpc.server import Server
from twostroke.telemetry.scrape import ScrapeEndpoint
from twostroke.telemetry.tracing import open_tracer
from twostroke.v1 import cluster_pb2_grpc, inference_pb2_grpc

if TYPE_CHECKING:
    from twostroke.router.vllm.http_edge import HttpEdge

log = logging.getLogger(__name__)

SERVICES = ("twostroke.v1.InferenceService", "twostroke.v1.ClusterService")


class Router:
    """A serving router."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        router_id = settings.router_id or f"router-{settings.grpc_port}"
        self.dispatcher = Dispatcher(settings, router_id)
        self._tracer = open_tracer(settings.otlp_url, settings.trace_ratio, "twostroke-router", router_id)
        self._scrape = self._observe()
        self._access = Access.of(settings)
        self._server = Server(settings.rpc, SERVICES, frozenset(), self._access.guard)
        self._inference = InferenceService(self.dispatcher, self._access)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self._inference, self._server.grpc)
        self._cluster = ClusterService(self.dispatcher, router_id)
        cluster_pb2_grpc.add_ClusterServiceServicer_to_server(self._cluster, self._server.grpc)
        self._http: HttpEdge | None = None
        self._http_started = asyncio.Event()

    def _observe(self) -> ScrapeEndpoint | None:
        """Has the dispatcher's requests observed; returns where their numbers are read."""
        settings, dispatcher = self._settings, self.dispatcher
        if not settings.metrics:
            dispatcher.observer = RequestObserver(self._tracer, None, log_prompts=settings.log_prompts)
            return None
        from twostroke.router.metrics import ClusterMetrics, RequestMetrics
        from twostroke.telemetry.metrics import Registry

        registry = Registry()
        registry.collect_from(ClusterMetrics(dispatcher.pool, dispatcher))
        counted = RequestMetrics(registry)
        dispatcher.observer = RequestObserver(self._tracer, counted, log_prompts=settings.log_prompts)
        return ScrapeEndpoint(registry.render)

    async def run(self, stop: asyncio.Event) -> None:
        """Serves until `stop`, then drains. Raises ConfigError for a port that is taken or a model that is refused."""
        settings = self._settings
        self.dispatcher.loading = "its front end (importing vLLM)" if settings.front_end == "vllm" else ""
        port = await self._server.start(settings.host, settings.grpc_port, "--grpc-port")
        log.info("gRPC on %s:%d", settings.host, port)
        try:
            if self._scrape is not None:
                await self._scrape.start(settings.host, settings.metrics_port)
            max_model_len_tokens = await self._load_front_end()
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self.dispatcher.pool.run(max_model_len_tokens), name="workers"),
                    group.create_task(self._follow_readiness(), name="readiness"),
                    group.create_task(self.dispatcher.roles.run(), name="roles"),
                ]
                http = group.create_task(self._http.run(self._http_started.set), name="http") if self._http else None
                await stop.wait()
                await self._drain(http)
                for task in tasks:
                    task.cancel()
        finally:
            await self._server.drain(0.2)
            if self._http is not None:
                self._http.close()
            if self._scrape is not None:
                await self._scrape.close()
            if self._tracer is not None:
                await asyncio.to_thread(self._tracer.close)

    async def _load_front_end(self) -> int:
        """Makes the front end; returns the sequence length that it promises, 0 for whatever the workers have."""
        settings = self._settings
        if settings.front_end == "plain":
            self._inference.use(PlainFrontEnd(self.dispatcher, settings.served_model_name or "reference"))
            return settings.max_model_len_tokens
        started = time.monotonic()
        # Imports hold the interpreter for seconds; in a thread, status calls are answered meanwhile.
        from twostroke.router.vllm import http_edge

        http_edge.prepare_environment(settings)
        args = await asyncio.to_thread(http_edge.parse_arguments, settings)
        self.dispatcher.loading = "its front end (reading the model's configuration and tokenizer)"
        config = await asyncio.to_thread(http_edge.make_config, args)
        self._http = http_edge.HttpEdge(settings, args, config, self.dispatcher, self._access, self._cluster)
        self._inference.use(self._http.front_end)
        self._cluster.tokenize = self._http.front_end.tokenize
        self.dispatcher.loading = ""
        log.info("front end of %s ready after %.1f s", args.model, time.monotonic() - started)
        return int(config.model_config.max_model_len)

    async def _follow_readiness(self) -> None:
        said = None
        while True:
            waiting_for = self.dispatcher.waiting_for()
            # What is missing, without the reasons, which change with every attempt to connect.
            missing = waiting_for.partition(" (")[0]
            if missing != said:
                said = missing
                log.info("waiting for %s", waiting_for) if waiting_for else log.info("ready")
                await self._server.set_ready(not waiting_for)
            await self.dispatcher.pool.wait_state_changed()

    async def _drain(self, http: asyncio.Task[None] | None) -> None:
        log.info("draining: %d requests run", self.dispatcher.active_requests)
        await self._server.set_ready(False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_s):
                await self.dispatcher.idle()
        await self.dispatcher.close()
        if http is not None:
            http.cancel()

    async def http_started(self) -> None:
        """Returns when HTTP listens; for the entry point, whose signal handlers vLLM's server replaces."""
        await self._http_started.wait()
