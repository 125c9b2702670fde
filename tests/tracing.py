"""Spans in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from common.telemetry import Tracing
from common.trace_context import Sampling


class Memory(SpanExporter):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.spans += spans
        return SpanExportResult.SUCCESS


class Recorder:
    """Tracing into memory; `spans` ends it."""

    def __init__(self, service: str, sampling: Sampling | None = None) -> None:
        self._memory = Memory()
        self.tracing = Tracing(service, self._memory, sampling=sampling)

    @property
    def spans(self) -> list[ReadableSpan]:
        self.tracing.shutdown(5.0)
        return self._memory.spans

    def named(self, name: str) -> list[ReadableSpan]:
        return [s for s in self.spans if s.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    """Attributes by their names without `tandem.`."""
    return {k.removeprefix("tandem."): v for k, v in (span.attributes or {}).items()}


def events(span: ReadableSpan) -> list[str]:
    return [e.name.removeprefix("tandem.") for e in span.events]


CALLER = "00-0000000000000000000000000000abcd-000000000000ef01-01"
UNSAMPLED = CALLER[:-2] + "00"
