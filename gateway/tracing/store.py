"""The newest traces, in memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

from gateway.tracing.spans import Span


class Trace:
    """The spans of one trace that have arrived so far, in any order."""

    def __init__(self, trace_id: str) -> None:
        self.trace_id = trace_id
        self.spans: dict[str, Span] = {}
        self.changed_at = time.monotonic()
        self.num_dropped = 0


class Store:
    """Keeps the newest `max_traces` traces, each with at most `max_spans` spans.

    Any thread may call it. Spans of a trace that has been let go are dropped when they come
    late: they would push out a newer one.
    """

    def __init__(self, max_traces: int = 256, max_spans: int = 16_384) -> None:
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._traces: OrderedDict[str, Trace] = OrderedDict()  # by first arrival
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._changed = threading.Condition()
        self._version = 0
        self.num_dropped = 0  # spans

    def add(self, spans: Iterable[Span]) -> None:
        """Take spans in; one that comes twice counts once."""
        with self._changed:
            for span in spans:
                self._add(span)
            self._version += 1
            self._changed.notify_all()

    def _add(self, span: Span) -> None:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            if span.trace_id in self._gone:
                self.num_dropped += 1
                return
            trace = self._traces[span.trace_id] = Trace(span.trace_id)
            if len(self._traces) > self._max_traces:
                self._let_go()
        if len(trace.spans) >= self._max_spans and span.span_id not in trace.spans:
            trace.num_dropped += 1
            self.num_dropped += 1
            return
        trace.spans[span.span_id] = span
        trace.changed_at = time.monotonic()

    def _let_go(self) -> None:
        oldest, _ = self._traces.popitem(last=False)
        self._gone[oldest] = None
        if len(self._gone) > 4 * self._max_traces:
            self._gone.popitem(last=False)

    def traces(self) -> list[tuple[str, tuple[Span, ...], float]]:
        """Id, spans and seconds of silence of every trace, newest last."""
        with self._changed:
            now = time.monotonic()
            return [
                (t.trace_id, tuple(t.spans.values()), now - t.changed_at)
                for t in self._traces.values()
            ]

    def version(self) -> int:
        """Grows with every export."""
        with self._changed:
            return self._version

    def wait(self, seen: int, timeout_seconds: float) -> int:
        """Wait until the version is beyond `seen`, or the time is over; returns the version."""
        with self._changed:
            self._changed.wait_for(lambda: self._version > seen, timeout_seconds)
            return self._version
