"""InferenceService: the gRPC front door."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from twostroke.errors import NoWorkerError
from twostroke.router.dispatch import Dispatcher
from twostroke.router.front_end import FrontEnd, check_model
from twostroke.v1 import inference_pb2 as pb
from twostroke.v1 import inference_pb2_grpc


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """Answers requests through a front end."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._front_end: FrontEnd | None = None

    def use(self, front_end: FrontEnd) -> None:
        """Sets the front end, once it is there."""
        self._front_end = front_end

    def _ready(self) -> FrontEnd:
        waiting_for = self._dispatcher.waiting_for()
        if self._front_end is None or waiting_for:
            raise NoWorkerError(f"the router is not ready: it waits for {waiting_for or 'its front end'}")
        return self._front_end

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.GenerateResponse]:
        """One answer as a stream; cancellation frees everything."""
        front_end = self._ready()
        check_model(request, front_end.models())
        answer = front_end.generate(request, context.time_remaining())
        try:
            async for response in answer:
                yield response
        finally:
            await answer.aclose()  # type: ignore[attr-defined]

    async def ListModels(
        self, request: pb.ListModelsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ListModelsResponse:
        """What can be served now; NoWorkerError when nothing can."""
        return pb.ListModelsResponse(models=self._ready().models())
