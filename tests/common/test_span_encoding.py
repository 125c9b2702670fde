"""Our encoder makes the message that the SDK's makes."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.span_encoding import encode

REMOTE = SpanContext(5, 7, is_remote=True, trace_flags=TraceFlags(1))
LOCAL = SpanContext(5, 8, is_remote=False, trace_flags=TraceFlags(1))


def _span(number: int, parent: SpanContext | None, kind: SpanKind) -> ReadableSpan:
    return ReadableSpan(
        name=f"span {number}",
        context=SpanContext(5, 100 + number, is_remote=False, trace_flags=TraceFlags(1)),
        parent=parent,
        resource=Resource({"service.name": "tandem-target", "n": 3}, "https://schema"),
        attributes={
            "text": "käse",
            "zero": 0,
            "negative": -(2**62),
            "share": 0.25,
            "yes": True,
            "no": False,
            "ids": (1, 2, 3),
            "none": (),
            "names": ("a", "b"),
        },
        events=[Event("happened", {"why": "so"}, timestamp=17), Event("plain", timestamp=18)],
        links=[Link(REMOTE), Link(LOCAL)],
        kind=kind,
        status=Status(StatusCode.ERROR, "broken") if number % 2 else Status(),
        start_time=1_000 + number,
        end_time=2_000 + number,
        instrumentation_scope=InstrumentationScope("tandem", "0.1.0", "https://schema"),
    )


def test_the_same_message() -> None:
    parents = (None, REMOTE, LOCAL)
    spans = [_span(i, parents[i % 3], kind) for i, kind in enumerate(SpanKind)]
    assert encode(spans) == encode_spans(spans)


def test_without_attributes() -> None:
    bare = ReadableSpan(
        name="bare",
        context=LOCAL,
        resource=Resource({}),
        start_time=1,
        end_time=2,
        instrumentation_scope=InstrumentationScope("tandem"),
    )
    assert encode([bare]) == encode_spans([bare])
