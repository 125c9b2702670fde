"""Ended spans on their way to a collector that may be slow, dead or a black hole."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)


class SpanQueue:
    """A bounded queue and the one thread that empties it; `put` never waits.

    In place of the SDK's batch processor, which counts no losses and whose end takes as long
    as the exporter likes.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        max_size: int = 8192,
        max_batch: int = 512,
        delay_seconds: float = 1.0,
    ) -> None:
        self._exporter = exporter
        self._max_size, self._max_batch = max_size, min(max_size, max_batch)
        self._delay_seconds = delay_seconds
        self._spans: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._stopping = self._cut = False
        self._num_overflowed = 0  # grown by whoever puts
        self._num_failed = 0  # grown by the thread, and by shutdown once that is given up
        self._failing = False  # whether the last batch was lost
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    @classmethod
    def from_environment(cls, exporter: SpanExporter, environ: Mapping[str, str]) -> SpanQueue:
        """With the sizes that the standard `OTEL_BSP_*` variables ask for."""
        return cls(
            exporter,
            max_size=_number(environ, "OTEL_BSP_MAX_QUEUE_SIZE", 8192),
            max_batch=_number(environ, "OTEL_BSP_MAX_EXPORT_BATCH_SIZE", 512),
            delay_seconds=_number(environ, "OTEL_BSP_SCHEDULE_DELAY", 1000) / 1e3,
        )

    @property
    def num_dropped(self) -> int:
        """Spans that no collector has got; any thread."""
        return self._num_overflowed + self._num_failed

    def put(self, span: ReadableSpan) -> None:
        """Queue a span, or count it as dropped; one thread."""
        if self._stopping or len(self._spans) >= self._max_size:
            self._num_overflowed += 1
            return
        self._spans.append(span)
        if len(self._spans) >= self._max_batch and not self._wake.is_set():
            self._wake.set()

    def shutdown(self, timeout_seconds: float) -> None:
        """Export what is queued; after the time, drop it."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_seconds)
        self._cut = True
        self._exporter.shutdown()  # ends a call that hangs
        self._thread.join(1.0)
        self._num_failed += len(self._spans)
        self._spans.clear()
        if self.num_dropped:
            log.warning("%d spans were dropped", self.num_dropped)

    def _run(self) -> None:
        last = False
        while not last:
            last = self._stopping  # what was queued before it is exported below
            if not last:
                self._wake.wait(self._delay_seconds)
            self._wake.clear()
            while self._spans and not self._cut:
                self._export()

    def _export(self) -> None:
        num = min(len(self._spans), self._max_batch)
        batch = [self._spans.popleft() for _ in range(num)]
        try:
            failed = self._exporter.export(batch) is not SpanExportResult.SUCCESS
        except Exception:
            log.exception("fault of the exporter")
            failed = True
        if failed:
            self._num_failed += num
        if failed is not self._failing:
            self._failing = failed
            told = "spans don't reach the collector" if failed else "spans are exported again"
            log.warning(told)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    try:
        number = int(text or default)
    except ValueError:
        number = 0
    if number <= 0:
        log.warning("%s: %r is not a number above 0; using %d", name, text, default)
        return default
    return number
