"""The one place where errors become gRPC statuses and come back.

A status carries google.rpc.Status with exactly one ErrorInfo (reason, domain "twostroke") and a RetryInfo where a retry
makes sense, as AIP-193 asks.
"""

from __future__ import annotations

import re
from typing import NoReturn, cast

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from twostroke.errors import (
    Code,
    DeadlineError,
    InvalidRequestError,
    OverloadedError,
    TwostrokeError,
    UnavailableError,
    UnknownModelError,
    by_reason,
)
from twostroke.v1.engine_pb2 import Failure

DOMAIN = "twostroke"

# How gRPC words that nobody answers at an address.
_CONNECT = re.compile(
    r"failed to connect to all addresses.*?ip[^:]*:(\S+?): (?:Failed to connect to remote host: )?(.*)"
)

# How gRPC words that a message exceeds a limit, at either end.
_TOO_LARGE = re.compile(r"message larger than max", re.IGNORECASE)

_BY_CODE: dict[int, type[TwostrokeError]] = {
    Code.INVALID_ARGUMENT: InvalidRequestError,
    Code.NOT_FOUND: UnknownModelError,
    Code.RESOURCE_EXHAUSTED: OverloadedError,
    Code.UNAVAILABLE: UnavailableError,
    Code.DEADLINE_EXCEEDED: DeadlineError,
}


def to_status(error: TwostrokeError) -> status_pb2.Status:
    """The google.rpc.Status of an error."""
    status = status_pb2.Status(code=int(error.code), message=error.message)
    info = any_pb2.Any()
    info.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN))
    status.details.append(info)
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(error.retry_after_s * 1000))
        retry = any_pb2.Any()
        retry.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(retry)
    return status


async def abort(context: grpc.aio.ServicerContext[object, object], error: TwostrokeError) -> NoReturn:
    """Ends the RPC with the error's status."""
    status = rpc_status.to_status(to_status(error))
    await context.abort(status.code, status.details or "", status.trailing_metadata or ())
    raise AssertionError("abort raises")


def to_error(error: grpc.RpcError) -> TwostrokeError:
    """The error of a failed call: by reason where the other side gave one, else by status code."""
    call = cast(grpc.Call, error)
    code = call.code().value[0]
    details = call.details() or ""
    status = None
    # Metadata of a call that never reached the other side is None, which rpc_status does not take.
    if isinstance(error, grpc.aio.AioRpcError):
        status = _status_of(error.trailing_metadata())
    elif call.trailing_metadata() is not None:
        status = rpc_status.from_call(call)
    if status is not None:
        return _from_status(status)
    if _TOO_LARGE.search(details):
        # gRPC says RESOURCE_EXHAUSTED, which reads as if a retry could help.
        return InvalidRequestError(f"{details}; send less, or raise --rpc-max-message-bytes on both sides")
    refused = _CONNECT.search(details)
    error_message = f"cannot connect to {refused[1]}: {refused[2]}" if refused else details or "the call failed"
    return _make("", code, error_message, None)


def _status_of(metadata: grpc.aio.Metadata | None) -> status_pb2.Status | None:
    for key, value in metadata or ():
        if key == "grpc-status-details-bin":
            return status_pb2.Status.FromString(cast(bytes, value))
    return None


def _from_status(status: status_pb2.Status) -> TwostrokeError:
    reason, retry_after_s = "", None
    for detail in status.details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            reason = info.reason
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_after_s = retry.retry_delay.ToMilliseconds() / 1000
    return _make(reason, status.code, status.message, retry_after_s)


def _make(reason: str, code: int, message: str, retry_after_s: float | None) -> TwostrokeError:
    kind = by_reason(reason) or _BY_CODE.get(code, TwostrokeError)
    error = kind(message)
    error.retry_after_s = retry_after_s
    return error


def to_failure(error: TwostrokeError) -> Failure:
    """The error as a value inside a stream that goes on."""
    failure = Failure(code=int(error.code), reason=error.reason, message=error.message)
    if error.retry_after_s is not None:
        failure.retry_after_ms = int(error.retry_after_s * 1000)
    return failure


def from_failure(failure: Failure) -> TwostrokeError:
    """The error that `to_failure` made the value of."""
    retry_after_s = failure.retry_after_ms / 1000 if failure.HasField("retry_after_ms") else None
    return _make(failure.reason, failure.code, failure.message, retry_after_s)
