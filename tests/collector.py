"""An OpenTelemetry collector's stand-in: takes OTLP/HTTP JSON, and reads it by OpenTelemetry's own schema."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

PATIENCE = 60.0


class Collector:
    """What was sent so far."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Any] = []
        """Spans, as OpenTelemetry's schema has them."""
        self.resources: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: list[str] = []
        """What was not as the schema wants it."""
        self.answers: list[tuple[int, bytes]] = []
        """How the next requests are answered; then well."""
        self.requests = 0
        self._changed = threading.Condition()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, bytes]:
        from google.protobuf import json_format
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        with self._changed:
            self.requests += 1
            self._changed.notify_all()
            self.headers.append(headers)
            if self.answers and (answer := self.answers.pop(0))[0] != 200:
                return answer
            if path != "/v1/traces" or headers.get("content-type") != "application/json":
                self.faults.append(f"{path} {headers}")
                return 404, b""
            try:
                # Ids are hexadecimal in OTLP, and base64 in what protobuf makes of bytes.
                found = json_format.Parse(_ids(body), ExportTraceServiceRequest())
            except Exception as exc:
                self.faults.append(repr(exc))
                return 400, b""
            for resource in found.resource_spans:
                self.resources.append(attributes(resource.resource))
                for scope in resource.scope_spans:
                    self.spans += scope.spans
            self._changed.notify_all()
        return 200, b'{"partialSuccess":{}}'

    def wait(self, *names: str) -> dict[str, Any]:
        """Spans by name, once there is one of each of these."""

        def found() -> bool:
            return set(names) <= {span.name for span in self.spans} or bool(self.faults)

        with self._changed:
            assert self._changed.wait_for(found, PATIENCE), f"{names} of {[span.name for span in self.spans]}"
        assert not self.faults
        return {span.name: span for span in self.spans}

    def wait_requests(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.requests >= count, PATIENCE)


def _ids(body: bytes) -> bytes:
    import base64
    import json

    found = json.loads(body)
    for resource in found["resourceSpans"]:
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                for name in {"traceId", "spanId", "parentSpanId"} & set(span):
                    span[name] = base64.b64encode(bytes.fromhex(span[name])).decode()
    return json.dumps(found).encode()


def attributes(of: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in of.attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens. Without OpenTelemetry's schema, the test is skipped."""
    pytest.importorskip("opentelemetry.proto.trace.v1.trace_pb2", reason="needs opentelemetry-proto")
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            status, answer = found.take(self.path, {k.lower(): v for k, v in self.headers.items()}, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
