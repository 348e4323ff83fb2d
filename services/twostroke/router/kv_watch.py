"""Follows what KV blocks a worker has."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import grpc.aio

from twostroke.rpc.call import quiet
from twostroke.v1.worker_pb2 import WatchKvEventsRequest, WatchKvEventsResponse

if TYPE_CHECKING:  # there is one class when it runs
    from twostroke.v1.worker_pb2_grpc import WorkerServiceAsyncStub

log = logging.getLogger(__name__)

RETRY_S = 0.25


async def watch_kv(
    stub: WorkerServiceAsyncStub, worker_id: str, changed: Callable[[WatchKvEventsResponse], bool]
) -> None:
    """Passes a worker's KV events on, and asks for a snapshot when `changed` says that something was missed.

    Returns only by cancellation: that a worker cannot be followed for a while costs speed, not the worker.
    """
    while True:
        call = stub.WatchKvEvents(WatchKvEventsRequest())
        try:
            while (events := await quiet(call.read())) is not grpc.aio.EOF:
                if changed(cast(WatchKvEventsResponse, events)):
                    log.info("worker %s: news of its KV were missed; asking for all that it has", worker_id)
                    break
        except grpc.aio.AioRpcError as error:
            log.info("worker %s does not tell of its KV: %s", worker_id, error.details())
        finally:
            call.cancel()
        await asyncio.sleep(RETRY_S)
