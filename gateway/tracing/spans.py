"""Spans as they arrive over OTLP, as plain dataclasses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import cast

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

from common import attributes as registry

Value = str | bool | int | float | tuple["Value", ...] | None
ERROR = trace_pb2.Status.STATUS_CODE_ERROR
SCOPE = "tandem"  # the instrumentation scope of what is ours


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened within a span."""

    name: str
    at: int  # unix nanoseconds
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Span:
    """One finished span; ids are hexadecimal."""

    trace_id: str
    span_id: str
    parent_id: str  # empty: none
    name: str
    service: str  # gateway, target or draft
    begin: int  # unix nanoseconds, on the clock of the process that wrote it
    end: int
    attributes: Mapping[str, Value] = field(default_factory=dict)
    events: tuple[Event, ...] = ()
    links: tuple[str, ...] = ()  # span ids of the same trace
    failed: bool = False
    message: str = ""

    def text(self, attribute: registry.Attribute, default: str = "") -> str:
        """A string attribute."""
        value = self.attributes.get(attribute.name)
        return value if isinstance(value, str) else default

    def number(self, attribute: registry.Attribute) -> int | None:
        """An int attribute; None if it is not there."""
        value = self.attributes.get(attribute.name)
        return int(value) if isinstance(value, int | float) else None

    def count(self, attribute: registry.Attribute) -> int:
        """An int attribute; 0 if it is not there."""
        return self.number(attribute) or 0

    def seconds(self, attribute: registry.Attribute) -> float | None:
        """A float attribute; None if it is not there."""
        value = self.attributes.get(attribute.name)
        return float(value) if isinstance(value, int | float) else None

    def ids(self, attribute: registry.Attribute) -> tuple[int, ...]:
        """A list of ints."""
        value = self.attributes.get(attribute.name)
        if not isinstance(value, tuple):
            return ()
        return tuple(item for item in value if isinstance(item, int))

    def has_event(self, name: str) -> bool:
        """Whether it happened within this span."""
        return any(event.name == name for event in self.events)


def from_otlp(resource_spans: Iterable[trace_pb2.ResourceSpans]) -> Iterator[Span]:
    """Our own spans of an export; what others send is dropped."""
    for block in resource_spans:
        for scope in block.scope_spans:
            for pb in scope.spans:
                service = _service(pb.name)
                if scope.scope.name == SCOPE and service and pb.trace_id and pb.span_id:
                    yield _span(pb, service)


def _service(name: str) -> str:
    """Who writes spans of that name: `service.name` is the user's to choose."""
    if "/" in name or name.endswith(".session"):
        return "gateway"
    return next((s for s in ("target", "draft") if name.startswith(f"{s}.")), "")


def _span(pb: trace_pb2.Span, service: str) -> Span:
    return Span(
        trace_id=pb.trace_id.hex(),
        span_id=pb.span_id.hex(),
        parent_id=pb.parent_span_id.hex(),
        name=pb.name,
        service=service,
        begin=pb.start_time_unix_nano,
        end=max(pb.start_time_unix_nano, pb.end_time_unix_nano),
        attributes=_attributes(pb.attributes),
        events=tuple(Event(e.name, e.time_unix_nano, _attributes(e.attributes)) for e in pb.events),
        links=tuple(link.span_id.hex() for link in pb.links if link.trace_id == pb.trace_id),
        failed=pb.status.code == ERROR,
        message=pb.status.message,
    )


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Value]:
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Value:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return tuple(_value(item) for item in value.array_value.values)
    if kind in ("string_value", "bool_value", "int_value", "double_value"):
        return cast(Value, getattr(value, kind))
    return None  # bytes and maps: we write none
