"""InferenceService: the gRPC front door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from twostroke.errors import NoWorkerError, TwostrokeError
from twostroke.router.access import TENANT_HEADER, Access, bearer
from twostroke.router.dispatch import Dispatcher
from twostroke.router.edge import Edge
from twostroke.router.front_end import FrontEnd, check_model
from twostroke.router.ways import SLO_HEADER
from twostroke.rpc.trace_context import incoming
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers requests through a front end."""

    def __init__(self, dispatcher: Dispatcher, access: Access) -> None:
        self._dispatcher = dispatcher
        self._access = access
        self._front_end: FrontEnd | None = None

    def use(self, front_end: FrontEnd) -> None:
        """Sets the front end, once it is there."""
        self._front_end = front_end

    def _edge(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> Edge:
        operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        metadata = dict(context.invocation_metadata() or ())
        key = bearer(str(metadata.get("authorization", "")))
        return Edge(
            self._dispatcher.observer.tracer,
            operation,
            request.model or self._model(),
            incoming.get(),
            self._access.tenant(key, str(metadata.get(TENANT_HEADER, ""))),
            str(metadata.get(SLO_HEADER, "")),
        )

    def _ready(self, waiting_for: str) -> FrontEnd:
        if self._front_end is None or waiting_for:
            raise NoWorkerError(f"the router is not ready: it waits for {waiting_for or 'its front end'}")
        return self._front_end

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One answer as a stream; cancellation frees everything."""
        edge = self._edge(request, context)
        Edge.current.set(edge)
        error: TwostrokeError | None = None
        try:
            async for response in self._answer(request, context):
                yield response
        except TwostrokeError as raised:
            error = raised
            raise
        finally:
            edge.end(error.reason if error else "", error.message if error else "")

    async def _answer(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        front_end = self._ready(self._dispatcher.closed_for())
        check_model(request, front_end.models())
        answer = front_end.generate(request, context.time_remaining())
        try:
            async for response in answer:
                yield response
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    def _model(self) -> str:
        return self._front_end.models()[0].name if self._front_end else ""

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """What can be served now; NoWorkerError when nothing can."""
        return pb.ListModelsResponse(models=self._ready(self._dispatcher.waiting_for()).models())
