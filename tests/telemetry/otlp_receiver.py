"""An OTLP/gRPC receiver, a process of its own: `python otlp_receiver.py PORT FILE` appends a JSON line per span."""

from __future__ import annotations

import json
import sys
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)


def values(attributes: Any) -> dict[str, Any]:
    found = {}
    for attribute in attributes:
        kind = attribute.value.WhichOneof("value")
        value = getattr(attribute.value, kind)
        found[attribute.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return found


class Receiver(TraceServiceServicer):
    def __init__(self, file: Path) -> None:
        self._file = file

    def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:
        with self._file.open("a") as file:
            for resource_spans in request.resource_spans:
                resource = values(resource_spans.resource.attributes)
                for span in (span for scope in resource_spans.scope_spans for span in scope.spans):
                    line = {
                        "resource": resource,
                        "name": span.name,
                        "kind": span.kind,
                        "trace": span.trace_id.hex(),
                        "id": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "begin_ns": span.start_time_unix_nano,
                        "end_ns": span.end_time_unix_nano,
                        "error": span.status.message if span.status.code == 2 else "",
                        "links": [link.span_id.hex() for link in span.links],
                        "attributes": values(span.attributes),
                    }
                    file.write(json.dumps(line) + "\n")
        return ExportTraceServiceResponse()


def main(port: str, file: str) -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Receiver(Path(file)), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    Path(file).touch()
    server.wait_for_termination()


if __name__ == "__main__":
    main(*sys.argv[1:])
