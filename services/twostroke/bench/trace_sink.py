"""`python -m twostroke.bench.trace_sink PORT`: takes spans over OTLP/gRPC and forgets them."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc

from twostroke.config import RpcSettings
from twostroke.rpc.server import Server

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


async def _take(request: bytes, context: Any) -> bytes:
    # An empty message says that everything was taken.
    return b""


async def serve(port: int) -> None:
    """Serves until cancelled."""
    server = Server(RpcSettings(), (), frozenset())
    export: Any = grpc.unary_unary_rpc_method_handler(_take)
    server.grpc.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {"Export": export}),))
    await server.start("127.0.0.1", port)
    try:
        await asyncio.Event().wait()
    finally:
        await server.drain(0)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
