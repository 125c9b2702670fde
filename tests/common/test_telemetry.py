"""Traces: who is traced, what a span says, and collectors that fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags

from common import attributes, telemetry
from common.span_queue import SpanQueue
from common.telemetry import Tracing, from_environment
from common.trace_context import Sampling, format_traceparent, parse_traceparent
from tests.integration.collector import BlackHole, Collector
from tests.tracing import CALLER, UNSAMPLED, Memory, Recorder

RPC = "tandem.v1.GatewayService/Generate"


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.integers(0, 1))
def test_a_trace_context_survives_its_text(trace_id: int, span_id: int, flags: int) -> None:
    context = SpanContext(trace_id, span_id, True, TraceFlags(flags))
    found = parse_traceparent(format_traceparent(context))
    assert found is not None
    assert (found.trace_id, found.span_id, found.trace_flags) == (trace_id, span_id, flags)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        CALLER[:-1],
        CALLER.replace("00-", "ff-", 1),
        CALLER.upper(),
        CALLER + "-more",
        "00-" + "0" * 32 + CALLER[35:],
        CALLER[:36] + "0" * 16 + "-01",
    ],
)
def test_what_is_no_trace_context(text: str) -> None:
    assert parse_traceparent(text) is None


def test_a_later_version_may_say_more() -> None:
    assert parse_traceparent("01" + CALLER[2:] + "-more") is not None


@pytest.mark.parametrize(
    ("sampler", "root", "sampled", "unsampled"),
    [
        ("", True, True, False),
        ("parentbased_always_on", True, True, False),
        ("parentbased_always_off", False, True, False),
        ("always_on", True, True, True),
        ("always_off", False, False, False),
        ("parentbased_traceidratio", False, True, False),
        ("nonsense", True, True, False),
    ],
)
def test_samplers(sampler: str, root: bool, sampled: bool, unsampled: bool) -> None:
    environ = {"OTEL_TRACES_SAMPLER": sampler, "OTEL_TRACES_SAMPLER_ARG": "0"}
    tracing = Tracing("gateway", Memory(), sampling=Sampling.from_environment(environ))
    made = [tracing.begin(RPC, "SERVER", t) is not None for t in ("", CALLER, UNSAMPLED)]
    assert made == [root, sampled, unsampled]
    tracing.shutdown()


def test_a_ratio_traces_some() -> None:
    environ = {"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0.25"}
    tracing = Tracing("gateway", Memory(), sampling=Sampling.from_environment(environ))
    num = sum(tracing.begin(RPC, "SERVER", "") is not None for _ in range(2000))
    assert 350 < num < 650  # 11 standard deviations
    tracing.shutdown()


def test_what_is_not_sampled_makes_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a span was made")

    monkeypatch.setattr(telemetry, "Span", refuse)
    recorder = Recorder("gateway")
    assert recorder.tracing.begin(RPC, "SERVER", UNSAMPLED) is None
    assert Tracing("gateway").begin(RPC, "SERVER", CALLER) is None
    assert recorder.spans == []


@pytest.mark.parametrize(
    ("environ", "traces"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, True),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
            False,
        ),
        (
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
            False,
        ),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, False),
    ],
)
def test_nothing_is_exported_unless_asked(environ: dict[str, str], traces: bool) -> None:
    tracing = from_environment("target", environ)
    assert (tracing.begin(RPC, "SERVER", "") is not None) is traces
    tracing.shutdown()


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({}, "tandem-draft"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=theirs,deployment=a%20b"}, "theirs"),
    ],
)
def test_the_resource(environ: dict[str, str], name: str) -> None:
    resource = Tracing("draft", environ=environ).resource
    assert resource.attributes["service.name"] == name
    assert resource.attributes.get("deployment") in (None, "a b")
    assert resource.schema_url == attributes.SCHEMA_URL


def test_what_a_span_says() -> None:
    recorder = Recorder("target")
    now, wall = time.monotonic(), time.time()
    span = recorder.tracing.begin("target.sequence", "SERVER", CALLER, now)
    assert span is not None
    child = span.child("target.verify", began_at=now + 0.5, links=[CALLER])
    child.put(attributes.TOKEN_IDS, (1, 2))
    child.end(now + 0.75)
    span.event("tandem.closed", now + 1)
    span.fail("it broke")
    span.end(now + 2)
    span.end(now + 3)
    first, second = recorder.spans
    assert (second.name, second.kind, second.status.status_code, second.status.description) == (
        "target.sequence", SpanKind.SERVER, StatusCode.ERROR, "it broke",
    )  # fmt: skip
    assert second.parent is not None
    assert second.context is not None
    assert format_traceparent(second.parent) == CALLER
    assert first.parent == second.context
    assert first.attributes == {"tandem.token_ids": (1, 2)}
    assert [format_traceparent(link.context) for link in first.links] == [CALLER]
    assert _lasted(first) == pytest.approx(0.25)
    assert _lasted(second) == pytest.approx(2)
    assert second.start_time == pytest.approx(wall * 1e9, abs=1e9)


def _lasted(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


class Faulty(SpanExporter):
    """Does what it is told with every batch."""

    def __init__(self, act: Callable[[], SpanExportResult]) -> None:
        self._act = act
        self.ended = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return self._act()

    def shutdown(self) -> None:
        self.ended.set()


def _raise() -> SpanExportResult:
    raise RuntimeError("exporters may")


@pytest.mark.parametrize("act", [_raise, lambda: SpanExportResult.FAILURE])
def test_what_is_lost_is_counted(act: Callable[[], SpanExportResult]) -> None:
    queue = SpanQueue(Faulty(act), max_batch=10)
    for _ in range(25):
        queue.put(ReadableSpan("x"))
    queue.shutdown(5.0)
    assert queue.num_dropped == 25
    queue.put(ReadableSpan("late"))
    assert queue.num_dropped == 26


def test_a_hanging_exporter_holds_up_nobody() -> None:
    exporter = Faulty(lambda: SpanExportResult.FAILURE)
    begun = threading.Event()

    def hang() -> SpanExportResult:
        begun.set()
        exporter.ended.wait(60)
        return SpanExportResult.FAILURE

    exporter._act = hang
    queue = SpanQueue(exporter, max_size=100, max_batch=10)
    span = ReadableSpan("x")  # a slow thing to make without a resource
    for _ in range(10):
        queue.put(span)
    assert begun.wait(5)
    began = time.monotonic()
    for _ in range(1000):
        queue.put(span)
    assert time.monotonic() - began < 0.5
    assert queue.num_dropped == 900
    began = time.monotonic()
    queue.shutdown(0.2)
    assert time.monotonic() - began < 1
    assert queue.num_dropped == 1010


def test_a_black_hole_is_left_in_time() -> None:
    with BlackHole() as hole:
        tracing = from_environment("gateway", hole.env)
        began = time.monotonic()
        for _ in range(2000):
            span = tracing.begin(RPC, "SERVER", "")
            assert span is not None
            span.end()
        assert time.monotonic() - began < 1
        time.sleep(0.3)  # an export is under way
        began = time.monotonic()
        tracing.shutdown(0.5)
        assert time.monotonic() - began < 2
    assert tracing.num_dropped == 2000


def test_everything_that_waits_is_exported_at_the_end() -> None:
    with Collector() as collector:
        tracing = from_environment("gateway", collector.env | {"OTEL_BSP_SCHEDULE_DELAY": "60000"})
        for _ in range(1500):
            span = tracing.begin(RPC, "SERVER", "")
            assert span is not None
            span.end()
        tracing.shutdown()
    assert len(collector.spans) == 1500
    assert tracing.num_dropped == 0
    assert collector.spans[0].service == "gateway"
    assert set(collector.schemas) == {attributes.SCHEMA_URL}


def test_the_page_of_the_registry_is_fresh() -> None:
    assert attributes.PAGE.read_text() == attributes.page(), "run python -m common.attributes"


def test_the_registry_names_nothing_twice() -> None:
    for span in attributes.SPANS:
        names = [a.name for a in span.attributes]
        assert len(names) == len(set(names)), span.name
        known = {a.name: a.kind for s in attributes.SPANS for a in s.attributes}
        assert all(known[a.name] is a.kind for a in span.attributes)
