"""A collector of traces, and one that swallows everything."""

from __future__ import annotations

import socket
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from common.attributes import SCHEMA_URL, Kind
from common.attributes import span as registered

KINDS = {
    Kind.STRING: "string_value",
    Kind.INT: "int_value",
    Kind.FLOAT: "double_value",
    Kind.BOOL: "bool_value",
}
INNER = {Kind.INTS: "int_value", Kind.STRINGS: "string_value"}


@dataclass(frozen=True)
class Received:
    """A span and the process that wrote it."""

    span: trace_pb2.Span
    service: str
    instance: str

    @property
    def id(self) -> bytes:
        return self.span.span_id

    @property
    def seconds(self) -> float:
        return (self.span.end_time_unix_nano - self.span.start_time_unix_nano) / 1e9

    @property
    def events(self) -> list[str]:
        return [e.name for e in self.span.events]

    def get(self, name: str) -> Any:
        """An attribute's value; None if it is not there."""
        return next((_plain(a.value) for a in self.span.attributes if a.key == name), None)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_plain(v) for v in value.array_value.values]
    return getattr(value, kind)


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent; a context manager."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.schemas: Counter[str] = Counter()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
        add(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    @property
    def env(self) -> dict[str, str]:
        return environment(self.port)

    def Export(self, request: Any, context: Any) -> Any:  # noqa: N802
        for block in request.resource_spans:
            resource = {a.key: a.value.string_value for a in block.resource.attributes}
            service = resource["service.name"].removeprefix("tandem-")
            for scope in block.scope_spans:
                self.schemas[scope.schema_url] += 1
                self.spans += [
                    Received(s, service, resource["service.instance.id"]) for s in scope.spans
                ]
        return pb.ExportTraceServiceResponse()

    def traces(self) -> dict[bytes, list[Received]]:
        """Spans by trace id."""
        found: dict[bytes, list[Received]] = defaultdict(list)
        for span in list(self.spans):
            found[span.span.trace_id].append(span)
        return dict(found)

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        self._server.stop(None).wait()


class BlackHole:
    """Takes connections and what is sent on them, and says nothing; a context manager."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._taken: list[socket.socket] = []
        threading.Thread(target=self._take, daemon=True).start()

    @property
    def env(self) -> dict[str, str]:
        return environment(self.port)

    def _take(self) -> None:
        while True:
            try:
                self._taken.append(self._socket.accept()[0])
            except OSError:
                return

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for taken in self._taken:
            taken.close()


def environment(port: int) -> dict[str, str]:
    """What makes a service export to this port, soon."""
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
    }


def check_registered(received: Received) -> None:
    """A span is in the registry, with the right attributes of the right types."""
    span = registered(received.span.name, received.service)
    assert span is not None, (received.service, received.span.name)
    kind = trace_pb2.Span.SpanKind.Name(received.span.kind)
    assert kind == f"SPAN_KIND_{span.kind}", span.name
    known = {a.name: a for a in span.attributes}
    for pair in received.span.attributes:
        attribute = known[pair.key]
        wanted = KINDS.get(attribute.kind, "array_value")
        assert pair.value.WhichOneof("value") == wanted, (span.name, pair.key)
        for value in pair.value.array_value.values:
            assert value.WhichOneof("value") == INNER[attribute.kind], (span.name, pair.key)
    present = {pair.key for pair in received.span.attributes}
    missing = {a.name for a in span.attributes if a.required} - present
    assert not missing, (span.name, missing)
    assert received.span.end_time_unix_nano >= received.span.start_time_unix_nano


def check_schemas(collector: Collector) -> None:
    assert set(collector.schemas) == {SCHEMA_URL}
