"""A collector of traces on the loopback interface, and a server that exports to it. Holds no tests."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from server.harness import Server, serving

TIMEOUT = 60.0
FLAGS = ("--max-model-len", "512", "--disable-uvicorn-access-log")


@dataclass
class Span:
    """An exported span. `parent` is "" without one."""

    name: str
    kind: int
    trace: str
    parent: str
    start: int
    end: int
    status: int
    attributes: dict[str, Any]
    resource: dict[str, Any]


class Collector(ThreadingHTTPServer):
    """HTTP server that decodes the traces that are posted to `/v1/traces`. `status`: HTTP status of its answers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.posts: Queue[int] = Queue()
        self.spans: Queue[Span] = Queue()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"

    def take(self, count: int = 1) -> list[Span]:
        """Wait for `count` spans and return them."""
        return [self.spans.get(timeout=TIMEOUT) for _ in range(count)]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        collector = self.server
        assert isinstance(collector, Collector)
        status = collector.status
        if status == 200 and self.path == "/v1/traces":
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    for span in scope.spans:
                        collector.spans.put(_read(span, resource.resource))
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()
        collector.posts.put(status)

    def log_message(self, *_: Any) -> None:
        return


def _read(span: Any, resource: Any) -> Span:
    return Span(
        name=span.name,
        kind=span.kind,
        trace=span.trace_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        status=span.status.code,
        attributes={attribute.key: _value(attribute.value) for attribute in span.attributes},
        resource={attribute.key: _value(attribute.value) for attribute in resource.attributes},
    )


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind != "kvlist_value" else MessageToDict(value)


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        yield collector
        collector.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def traced(collector: Collector) -> Iterator[Server]:
    """A server that exports ten times a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
        patch.setenv("OTEL_SERVICE_NAME", "checked")
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        with serving(*FLAGS, "--otlp-traces-endpoint", collector.url) as server:
            yield server


@pytest.fixture(autouse=True)
def nothing_left(collector: Collector) -> Iterator[None]:
    """Check that the test has read all spans."""
    yield
    assert collector.spans.empty()
