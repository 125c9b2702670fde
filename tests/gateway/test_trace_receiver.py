"""Spans over real OTLP/gRPC into a bounded store."""

from __future__ import annotations

import threading

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from common.errors import ConfigurationError
from gateway.tracing import Receiver, Store, read, requests
from gateway.tracing.model import Outcome
from gateway.tracing.receiver import SERVICE
from tests.gateway.traces import TraceMaker, drafted, simple


def send(address: str, t: TraceMaker, *services: str) -> None:
    with grpc.insecure_channel(address) as channel:
        export = channel.unary_unary(
            f"/{SERVICE}/Export",
            request_serializer=pb.ExportTraceServiceRequest.SerializeToString,
            response_deserializer=pb.ExportTraceServiceResponse.FromString,
        )
        request = pb.ExportTraceServiceRequest(resource_spans=t.otlp(*services))
        export(request, timeout=20, wait_for_ready=True)


def test_services_send_in_any_order() -> None:
    t, store = simple(drafted(6)), Store()
    with Receiver(store, "127.0.0.1:0") as receiver:
        outcomes = []
        for service in ("draft", "gateway", "target", "target"):  # an export may be repeated
            send(receiver.address, t, service)
            ((trace_id, spans, silence),) = store.traces()
            outcomes.append(read(trace_id, spans).complete)
            assert silence < 5
    assert outcomes == [False, False, True, True]
    assert len(spans) == len(t.spans)
    assert read("t", spans) == read("t", t.read())
    assert store.num_dropped == 0


def test_the_sdks_own_exporter_is_understood() -> None:
    store = Store()
    with Receiver(store, "127.0.0.1:0") as receiver:
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=f"http://{receiver.address}", insecure=True)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        tracer = provider.get_tracer("tandem")
        with tracer.start_as_current_span("tandem.v1.GatewayService/Generate") as root:
            root.set_attribute("tandem.request.id", "r1")
            root.set_attribute("gen_ai.usage.output_tokens", 3)
        with provider.get_tracer("some app").start_as_current_span("other/Call"):
            pass
        provider.shutdown()
    ((trace_id, spans, _),) = store.traces()
    (request,) = requests(trace_id, spans)
    assert (request.request_id, request.figures.tokens) == ("r1", 3)


def test_a_port_that_is_taken_is_told() -> None:
    with (
        Receiver(Store(), "127.0.0.1:0") as receiver,
        pytest.raises(ConfigurationError, match="can't be bound"),
    ):
        Receiver(Store(), receiver.address)


def test_the_store_keeps_the_newest_traces() -> None:
    store = Store(max_traces=3)
    for number in range(1, 6):
        store.add(simple(drafted(2), number=number).read("gateway"))
    store.add(simple(drafted(2), number=1).read("target"))  # late, and of one let go
    store.add(simple(drafted(2), number=4).read("target"))
    held = {int(trace_id, 16): len(spans) for trace_id, spans, _ in store.traces()}
    assert list(held) == [3, 4, 5]
    assert held[4] > held[3]
    assert store.num_dropped == len(simple(drafted(2)).read("target"))


def test_a_trace_is_bounded_too() -> None:
    store = Store(max_spans=10)
    spans = simple(drafted(30)).read()
    store.add(spans)
    store.add(spans[:3])
    assert [len(held) for _, held, _ in store.traces()] == [10]
    assert store.num_dropped == len(spans) - 10


def test_waiting_ends_with_news_or_with_the_time() -> None:
    store = Store()
    assert store.wait(store.version(), 0.01) == 0
    threading.Timer(0.05, lambda: store.add(simple(drafted(1)).read())).start()
    assert store.wait(0, 10) == 1
    assert store.wait(0, 10) == 1


def test_several_requests_under_one_traceparent() -> None:
    first, second = simple(drafted(3)), simple(drafted(4), request_id="req-2")
    for _, span in second.spans:  # same trace, other spans
        moved = {s: bytes([9]) + s[1:] for s in (span.span_id, span.parent_span_id)}
        span.span_id = moved[span.span_id]
        span.parent_span_id = moved[span.parent_span_id] if span.parent_span_id else b""
        span.start_time_unix_nano += 10**9
        span.end_time_unix_nano += 10**9
        for link in span.links:
            link.span_id = bytes([9]) + link.span_id[1:]
    spans = first.read() + second.read()
    found = requests("t", spans)
    assert [(r.request_id, len(r.rounds), r.complete) for r in found] == [
        ("req-1", 3, True),
        ("req-2", 4, True),
    ]
    orphans = [s for s in spans if s.span_id != spans[0].span_id]
    assert [r.outcome for r in requests("t", orphans)] == [Outcome.RUNNING, Outcome.FINISHED]
