"""Traces: what a process writes spans with, and how they get out.

Made once in each `__main__` from the standard `OTEL_*` variables. Nothing is exported unless
an OTLP endpoint or exporter is named. A sequence or request that is not sampled makes no span
at all; a sampled one costs some microseconds a span, here and when a batch is encoded, in a
thread of its own. Whatever a collector does, requests go on: spans wait in a
bounded queue, and those that find it full or can't be delivered are counted and dropped.

Spans are made by hand with `Span.child` and `Span.end`, never as a current span: requests
interleave within a task, and a context variable does not survive a generator's `yield`. They
belong to the event loop's thread.
"""

from __future__ import annotations

import logging
import random
import time
import urllib.parse
import uuid
from collections.abc import Mapping, Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import common
from common.attributes import SCHEMA_URL, Attribute
from common.span_encoding import OTLPExporter
from common.span_queue import SpanQueue
from common.trace_context import Sampling, format_traceparent, parse_traceparent

log = logging.getLogger(__name__)
Value = str | bool | int | float | Sequence[int] | Sequence[str]
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_KINDS = {kind.name: kind for kind in SpanKind}
SAMPLED = TraceFlags(TraceFlags.SAMPLED)


class Span:
    """One span; written out when it ends. Times are monotonic seconds, now if left out."""

    __slots__ = (
        "_began_at",
        "_kind",
        "_links",
        "_status",
        "attributes",
        "context",
        "ended",
        "events",
        "name",
        "parent",
        "tracing",
    )

    def __init__(
        self,
        tracing: Tracing,
        name: str,
        kind: str,
        parent: SpanContext | None,
        *,
        began_at: float,
        trace_id: int = 0,
        links: Sequence[str] = (),
    ) -> None:
        self.tracing = tracing
        self.name = name
        self.parent = parent
        trace_id = parent.trace_id if parent is not None else trace_id
        self.context = SpanContext(trace_id, _new_id(64), is_remote=False, trace_flags=SAMPLED)
        self.attributes: dict[str, Value] = {}
        self.events: list[Event] = []
        self.ended = False
        self._kind = _KINDS[kind]
        self._began_at = began_at
        self._links = links
        self._status = Status()

    @property
    def traceparent(self) -> str:
        """What a peer or a link names this span by."""
        return format_traceparent(self.context)

    @property
    def trace_id(self) -> str:
        """In hexadecimal, as logs and exemplars have it."""
        return f"{self.context.trace_id:032x}"

    def put(self, attribute: Attribute, value: Value) -> None:
        """Set an attribute of the registry."""
        self.attributes[attribute.name] = value

    def event(self, name: str, at: float | None = None) -> None:
        """Something has happened."""
        self.events.append(Event(name, timestamp=self.tracing.nanoseconds(at)))

    def fail(self, message: str) -> None:
        """It ended with an error."""
        self._status = Status(StatusCode.ERROR, message)

    def child(
        self,
        name: str,
        kind: str = "INTERNAL",
        *,
        began_at: float | None = None,
        links: Sequence[str] = (),
    ) -> Span:
        """A span below this one; links are traceparents."""
        at = time.monotonic() if began_at is None else began_at
        return Span(self.tracing, name, kind, self.context, began_at=at, links=links)

    def end(self, at: float | None = None) -> None:
        """Write it; ending it again changes nothing."""
        if self.ended:
            return
        self.ended = True
        self.tracing.write(self, at)

    def finished(self, end: int) -> ReadableSpan:
        """What is exported; end in nanoseconds."""
        began = self.tracing.nanoseconds(self._began_at)
        contexts = [c for c in map(parse_traceparent, self._links) if c is not None]
        return ReadableSpan(
            name=self.name,
            context=self.context,
            parent=self.parent,
            resource=self.tracing.resource,
            attributes=self.attributes,
            events=self.events,
            links=[Link(context) for context in contexts],
            kind=self._kind,
            status=self._status,
            start_time=began,
            end_time=max(began, end),
            instrumentation_scope=self.tracing.scope,
        )


class Tracing:
    """What one process writes its spans with; without an exporter it makes none."""

    def __init__(
        self,
        service: str,
        exporter: SpanExporter | None = None,
        *,
        sampling: Sampling | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = environ or {}
        self._sampling = sampling or Sampling()
        self._queue = SpanQueue.from_environment(exporter, environ) if exporter else None
        # One offset for the life of the process, so that durations are monotonic.
        self._offset = time.time_ns() - time.monotonic_ns()
        self.resource = _resource(service, environ)
        self.scope = InstrumentationScope("tandem", common.__version__, SCHEMA_URL)

    @property
    def num_dropped(self) -> int:
        """Spans that were lost: the queue was full, or the collector did not take them."""
        return self._queue.num_dropped if self._queue is not None else 0

    def begin(
        self, name: str, kind: str, traceparent: str, began_at: float | None = None
    ) -> Span | None:
        """The first span of a request or sequence here; None if it is not sampled.

        Below the remote span that `traceparent` names; a root if it names none.
        """
        if self._queue is None:
            return None
        parent = parse_traceparent(traceparent) if traceparent else None
        trace_id = parent.trace_id if parent is not None else _new_id(128)
        if not self._sampling.decide(trace_id, name, parent):
            return None
        at = time.monotonic() if began_at is None else began_at
        return Span(self, name, kind, parent, began_at=at, trace_id=trace_id)

    def nanoseconds(self, at: float | None = None) -> int:
        """Monotonic seconds as nanoseconds since 1970; now if None."""
        since = time.monotonic_ns() if at is None else round(at * 1e9)
        return self._offset + since

    def write(self, span: Span, at: float | None) -> None:
        """Hand an ended span to the exporter's thread."""
        if self._queue is not None:
            self._queue.put(span.finished(self.nanoseconds(at)))

    def shutdown(self, timeout_seconds: float = 5.0) -> None:
        """Export what waits, within a time; blocks."""
        if self._queue is not None:
            self._queue.shutdown(timeout_seconds)


def from_environment(service: str, environ: Mapping[str, str]) -> Tracing:
    """How this process traces: to be called once, in `__main__`; service is gateway, target, ..."""
    sampling = Sampling.from_environment(environ)
    name = environ.get("OTEL_TRACES_EXPORTER", "").strip().lower()
    endpoint = next((environ[n] for n in _ENDPOINTS if environ.get(n)), None)
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Tracing(service)
    if not name:
        name = "otlp" if endpoint else "none"
    if name == "none":
        return Tracing(service)
    if name != "otlp":
        log.warning("OTEL_TRACES_EXPORTER: %r is not known, only otlp and none; no traces", name)
        return Tracing(service)
    protocol = next((environ[n] for n in _PROTOCOLS if environ.get(n)), "grpc")
    if protocol != "grpc":
        log.warning("OTEL_EXPORTER_OTLP_PROTOCOL: %r is not spoken here; using grpc", protocol)
    # It says so at every attempt; the queue says it once.
    logging.getLogger("opentelemetry.exporter.otlp.proto.grpc").setLevel(logging.CRITICAL)
    exporter = OTLPExporter(endpoint=endpoint)
    return Tracing(service, exporter, sampling=sampling, environ=environ)


def _resource(service: str, environ: Mapping[str, str]) -> Resource:
    given: dict[str, str] = {}
    for pair in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = pair.partition("=")
        if key.strip() and equals:
            given[key.strip()] = urllib.parse.unquote(value.strip())
    named = (
        {"service.name": environ["OTEL_SERVICE_NAME"]} if environ.get("OTEL_SERVICE_NAME") else {}
    )
    own = {
        "service.name": f"tandem-{service}",
        "service.version": common.__version__,
        "service.instance.id": str(uuid.uuid4()),
    }
    return Resource(own | given | named, SCHEMA_URL)


def _new_id(num_bits: int) -> int:
    return random.getrandbits(num_bits) or 1
