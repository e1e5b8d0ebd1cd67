"""A receiver of OTLP over HTTP, on threads of its own: the classes of opentelemetry-proto decode what comes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

PATHS: dict[str, tuple[Any, Any]] = {
    "/v1/traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "/v1/metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
}


def plain(attributes: Any) -> dict[str, Any]:
    """Return attributes as a dict."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


class Receiver:
    """What arrived: `spans` with what describes their process, and the last value of each metric of each process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.spans: list[tuple[dict[str, Any], Any]] = []
        self.metrics: dict[str, dict[str, Any]] = {}
        self.address = ""

    def take(self, message: Any) -> None:
        with self.lock:
            for resource in getattr(message, "resource_spans", ()):
                about = plain(resource.resource.attributes)
                self.spans += [(about, span) for scope in resource.scope_spans for span in scope.spans]
            for resource in getattr(message, "resource_metrics", ()):
                known = self.metrics.setdefault(plain(resource.resource.attributes)["service.instance.id"], {})
                known |= {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}


@contextmanager
def receiving() -> Iterator[Receiver]:
    """Receive on a free port of this host within the scope."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # exporters keep their connections

        def do_POST(self) -> None:
            request, response = PATHS[self.path]
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.headers["content-type"] == "application/x-protobuf"
            message = request()
            message.ParseFromString(gzip.decompress(body) if self.headers["content-encoding"] == "gzip" else body)
            receiver.take(message)
            answer = response().SerializeToString()
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            with suppress(BrokenPipeError):  # a node that was killed meanwhile
                self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
