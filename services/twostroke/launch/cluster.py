"""What a router says about its cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

import grpc.aio

from twostroke.config import ClientSettings, load
from twostroke.errors import DeadlineError, TwostrokeError, UnauthenticatedError, UnavailableError
from twostroke.rpc.channel import connect
from twostroke.rpc.status import to_error
from twostroke.v1.cluster_pb2 import (
    ClusterServiceDrainRequest,
    ClusterServiceSetRoleRequest,
    ExplainRequest,
    ExplainResponse,
    ListRequestsRequest,
    RequestView,
    WatchRequest,
    WatchResponse,
)
from twostroke.v1.cluster_pb2_grpc import ClusterServiceStub
from twostroke.v1.worker_pb2 import Role

_RETRY_S = 0.1


async def fetch(target: str, timeout_s: float) -> WatchResponse:
    """The cluster now. Raises UnavailableError when nothing answers, DeadlineError when it takes too long."""
    client = load(ClientSettings)
    async with connect(target, client.rpc) as channel:
        call = ClusterServiceStub(channel).Watch(WatchRequest(once=True), timeout=timeout_s, metadata=client.metadata())
        try:
            async for view in call:
                call.cancel()
                return view
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error
    raise UnavailableError(f"{target} ended the watch without an answer")


async def follow(target: str, see: Callable[[WatchResponse], None], timeout_s: float) -> None:
    """Calls `see` with every change, for at most `timeout_s` seconds, through losses of the connection.

    Returns when the time is over. Raises UnauthenticatedError when the router wants another key. Cancellation ends the
    watch.
    """
    deadline = time.monotonic() + timeout_s
    client = load(ClientSettings)
    async with connect(target, client.rpc) as channel:
        while (left_s := deadline - time.monotonic()) > 0:
            call = ClusterServiceStub(channel).Watch(WatchRequest(), timeout=left_s, metadata=client.metadata())
            try:
                async for view in call:
                    see(view)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                    raise unreachable(target, error) from error
            finally:
                call.cancel()
            await asyncio.sleep(_RETRY_S)


async def requests(target: str, limit: int, timeout_s: float) -> Sequence[RequestView]:
    """A router's requests of late, the newest first. Raises as `fetch`."""
    client = load(ClientSettings)
    async with connect(target, client.rpc) as channel:
        call = ClusterServiceStub(channel).ListRequests(
            ListRequestsRequest(limit=limit), timeout=timeout_s, metadata=client.metadata()
        )
        try:
            return (await call).requests
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error


async def drain(target: str, worker: str, timeout_s: float) -> int:
    """Lets a worker leave. Returns how many requests run there still. Raises what the router raised."""
    client = load(ClientSettings)
    call = ClusterServiceDrainRequest(worker_id=worker)
    async with connect(target, client.rpc) as channel:
        try:
            done = await ClusterServiceStub(channel).Drain(call, timeout=timeout_s, metadata=client.metadata())
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error
    return int(done.requests)


async def set_role(target: str, worker: str, role: Role.ValueType, timeout_s: float) -> Role.ValueType:
    """Changes what a worker is sent. Returns what it was. Raises what the router raised."""
    client = load(ClientSettings)
    call = ClusterServiceSetRoleRequest(worker_id=worker, role=role)
    async with connect(target, client.rpc) as channel:
        try:
            done = await ClusterServiceStub(channel).SetRole(call, timeout=timeout_s, metadata=client.metadata())
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error
    return done.previous_role


async def explain(target: str, request: ExplainRequest, timeout_s: float) -> ExplainResponse:
    """Where a request would go now. Raises what the router raised."""
    client = load(ClientSettings)
    async with connect(target, client.rpc) as channel:
        try:
            return await ClusterServiceStub(channel).Explain(request, timeout=timeout_s, metadata=client.metadata())
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error


def unreachable(target: str, error: grpc.aio.AioRpcError) -> TwostrokeError:
    """The error of a call to a router, in terms of what to check."""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
        return UnavailableError(f"no router answers at {target}; `twostroke up` starts one, --router names another")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():
        return DeadlineError(f"{target} gave no complete answer in time")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UnauthenticatedError(f"{target}: {error.details()}; commands send the one in TWOSTROKE_API_KEY")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnavailableError(f"{target} is not a router; give --router the router's gRPC address")
    return to_error(error)
