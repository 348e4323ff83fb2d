"""A router's process without a cluster: says that its workers are ready, answers every request with the same text.

Arguments: port, then the workers' addresses. FAKE_WAITING_FOR in the environment keeps it from ever being ready.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

from twostroke.config import RpcSettings
from twostroke.rpc.server import Server
from twostroke.v1 import cluster_pb2 as pb
from twostroke.v1.cluster_pb2_grpc import ClusterServiceServicer, add_ClusterServiceServicer_to_server
from twostroke.v1.engine_pb2 import FINISH_REASON_STOP, Finish
from twostroke.v1.inference_pb2 import GenerateRequest, GenerateResponse, Timeline, Usage
from twostroke.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from twostroke.v1.worker_pb2 import GetInfoResponse, StartPhase


class Cluster(ClusterServiceServicer):
    def __init__(self, workers: list[str], waiting_for: str) -> None:
        self.workers = workers
        self.waiting_for = waiting_for

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.WatchResponse]:
        yield pb.WatchResponse(router_id="fake", ready=False, waiting_for="a decode worker (none)")
        info = GetInfoResponse(worker_id="w", start_phases=[StartPhase(name="load", duration_ms=1500.0)])
        state = pb.WORKER_STATE_STARTING if self.waiting_for else pb.WORKER_STATE_READY
        workers = [pb.WorkerView(address=worker, state=state, info=info) for worker in self.workers]
        yield pb.WatchResponse(
            router_id="fake", ready=not self.waiting_for, waiting_for=self.waiting_for, workers=workers
        )
        await asyncio.Event().wait()


class Inference(InferenceServiceServicer):
    async def Generate(self, request: GenerateRequest, context: Any) -> AsyncIterator[GenerateResponse]:
        for piece in ("The capital ", "is Paris."):
            yield GenerateResponse(text=piece)
        yield GenerateResponse(
            finish=Finish(reason=FINISH_REASON_STOP),
            usage=Usage(prompt_tokens=9, completion_tokens=5),
            timeline=Timeline(first_token_ms=30.0, finished_ms=70.0, prefill_started_ms=10.0),
        )


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = Server(RpcSettings(), (), frozenset())
    waiting_for = os.environ.get("FAKE_WAITING_FOR", "")
    add_ClusterServiceServicer_to_server(Cluster(sys.argv[2:], waiting_for), server.grpc)
    add_InferenceServiceServicer_to_server(Inference(), server.grpc)
    await server.start("127.0.0.1", int(sys.argv[1]))
    await stop.wait()
    await server.drain(0)


if __name__ == "__main__":
    asyncio.run(main())
