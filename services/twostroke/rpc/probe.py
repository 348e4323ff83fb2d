"""`python -m twostroke.rpc.probe HOST:PORT [SERVICE]`: exit code 0 when the service is SERVING, for health checks."""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twostroke.config import ClientSettings, load
from twostroke.errors import ConfigError
from twostroke.rpc.channel import connect_sync

TIMEOUT_S = 3.0


def check(target: str, service: str) -> str:
    """The health of one service: "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN", or why it could not be asked."""
    with connect_sync(target, load(ClientSettings).rpc) as channel:
        try:
            request = health_pb2.HealthCheckRequest(service=service)
            response = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return str(error.code().name)
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def main() -> int:
    """Entry point."""
    if len(sys.argv) not in (2, 3):
        sys.stderr.write("usage: python -m twostroke.rpc.probe HOST:PORT [SERVICE]\n")
        return 2
    try:
        answer = check(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else "")
    except ConfigError as error:
        answer = error.message
    sys.stdout.write(answer + "\n")
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
