"""What a router says about its cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import grpc.aio

from twostroke.config import RpcSettings
from twostroke.errors import DeadlineError, TwostrokeError, UnavailableError
from twostroke.rpc.channel import connect
from twostroke.rpc.status import to_error
from twostroke.v1.cluster_pb2 import WatchRequest, WatchResponse
from twostroke.v1.cluster_pb2_grpc import ClusterServiceStub

_RETRY_S = 0.1


async def fetch(target: str, timeout_s: float) -> WatchResponse:
    """The cluster now. Raises UnavailableError when nothing answers, DeadlineError when it takes too long."""
    async with connect(target, RpcSettings()) as channel:
        call = ClusterServiceStub(channel).Watch(WatchRequest(once=True), timeout=timeout_s)
        try:
            async for view in call:
                call.cancel()
                return view
        except grpc.aio.AioRpcError as error:
            raise unreachable(target, error) from error
    raise UnavailableError(f"{target} ended the watch without an answer")


async def follow(target: str, see: Callable[[WatchResponse], None], timeout_s: float) -> None:
    """Calls `see` with every change, for at most `timeout_s` seconds, through losses of the connection.

    Returns when the time is over. Cancellation ends the watch.
    """
    deadline = time.monotonic() + timeout_s
    async with connect(target, RpcSettings()) as channel:
        while (left_s := deadline - time.monotonic()) > 0:
            call = ClusterServiceStub(channel).Watch(WatchRequest(), timeout=left_s)
            try:
                async for view in call:
                    see(view)
            except grpc.aio.AioRpcError:
                pass
            finally:
                call.cancel()
            await asyncio.sleep(_RETRY_S)


def unreachable(target: str, error: grpc.aio.AioRpcError) -> TwostrokeError:
    """The error of a call to a router, in terms of what to check."""
    code = error.code()
    if code is grpc.StatusCode.UNAVAILABLE and not error.trailing_metadata():
        return UnavailableError(f"no router answers at {target}; `twostroke up` starts one, --router names another")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED and not error.trailing_metadata():
        return DeadlineError(f"{target} gave no complete answer in time")
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return UnavailableError(f"{target} is not a router; give --router the router's gRPC address")
    return to_error(error)
