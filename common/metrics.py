"""A process's metrics: a registry of its own, filled by the table, and the port it is read at.

`python -m common.metrics` writes `METRICS.md`.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

import common
from common.config import ServiceConfig
from common.errors import ConfigurationError
from common.metric_table import Kind, Metric, markdown, owned_by
from common.telemetry import Tracing
from common.trace_context import parse_traceparent

PAGE = Path(__file__).with_name("METRICS.md")
Reading = tuple[str, dict[str, str], float]
"""What is read at a scrape: name, labels without `pool`, value."""

# A second series for each counter and histogram, with its birth: nobody asks for it.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """All metrics that one service owns, each at zero."""

    def __init__(self, service: str, pool: str = "default") -> None:
        self.registry = CollectorRegistry()
        self._service, self._pool = service, pool
        self._table = {m.name: m for m in owned_by(service)}
        self._kept = {m.name: self._make(m) for m in self._table.values() if not m.at_scrape}
        self._models: dict[str, ModelMetrics] = {}
        self._readers: list[Callable[[], Iterable[Reading]]] = []
        build = {"pool": pool, "service": service, "version": common.__version__}
        self._kept["build_info"].labels(**build).set(1)
        self.registry.register(_AtScrape(self._read))
        ProcessCollector(registry=self.registry)

    def of(self, model: str) -> ModelMetrics:
        """The metrics of one model."""
        if model not in self._models:
            fixed = {"model": model, "pool": self._pool}
            table = {n: self._table[n] for n in self._kept if self._table[n].of_model}
            self._models[model] = ModelMetrics(table, self._kept, fixed)
        return self._models[model]

    def at_scrape(self, read: Callable[[], Iterable[Reading]]) -> None:
        """Let figures be read when they are asked for, by another thread."""
        self._readers.append(read)

    def _make(self, m: Metric) -> Any:
        if m.kind is Kind.HISTOGRAM:
            return Histogram(
                m.full_name, m.help, m.label_names, registry=self.registry, buckets=m.buckets
            )
        kind = Counter if m.kind is Kind.COUNTER else Gauge
        return kind(m.full_name, m.help, m.label_names, registry=self.registry)

    def _read(self) -> Iterator[Family]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for m in self._table.values():
            if m.at_scrape:
                kind = CounterMetricFamily if m.kind is Kind.COUNTER else GaugeMetricFamily
                families[m.name] = kind(m.full_name, m.help, labels=m.label_names)
        for name, labels, value in itertools.chain(*(read() for read in self._readers)):
            labels = {"pool": self._pool, "service": self._service} | labels
            values = [labels[label] for label in self._table[name].label_names]
            families[name].add_metric(values, value)
        yield from families.values()


class ModelMetrics:
    """The metrics of one model in one process; every series exists from the start."""

    def __init__(self, table: dict[str, Metric], kept: dict[str, Any], fixed: dict[str, str]):
        self._kept, self._fixed = kept, fixed
        self._series: dict[tuple[str, str], Any] = {}
        for m in table.values():
            assert len(m.labels) <= 1, f"{m.name}: one label of its own at most"
            for value in next(iter(m.labels.values()), ("",)):
                labels = dict.fromkeys(m.labels, value)
                self._series[m.name, value] = kept[m.name].labels(**fixed, **labels)

    def add(self, name: str, amount: float = 1, value: str = "") -> None:
        """Grow a counter; value is that of its own label, if it has one."""
        if amount:
            self._series[name, value].inc(amount)

    def set(self, name: str, amount: float) -> None:
        """Set a gauge."""
        self._series[name, ""].set(amount)

    def observe(self, name: str, amount: float, trace_id: str = "") -> None:
        """Put into a histogram; trace_id, of a sampled request, becomes the exemplar."""
        self._series[name, ""].observe(amount, {"trace_id": trace_id} if trace_id else None)


class _AtScrape(Collector):
    """Families that are made when they are asked for."""

    def __init__(self, read: Callable[[], Iterator[Family]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Family]:
        """Called by the registry."""
        return self._read()


class MetricsServer:
    """Answers Prometheus, in a thread of its own."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve(config: ServiceConfig, metrics: Metrics) -> MetricsServer | None:
    """Answer on the metrics port, if there is to be one; it ends with the process."""
    if not config.metrics_port:
        return None
    try:
        server = MetricsServer(metrics.registry, config.host, config.metrics_port)
    except OSError as error:
        raise ConfigurationError(
            f"{config.host}:{config.metrics_port} can't be bound ({error}); choose a free one",
            field="--metrics-port",
        ) from error
    # Whoever started us may read it from this line.
    print(  # noqa: T201
        f"tandem {config.name} tells metrics on http://{config.host}:{server.port}/metrics",
        flush=True,
    )
    return server


def watch_spans(metrics: Metrics, tracing: Tracing) -> None:
    """Tell at each scrape how many spans were lost."""
    metrics.at_scrape(lambda: [("spans_dropped_total", {}, tracing.num_dropped)])


def sampled_trace_id(traceparent: str) -> str:
    """The trace id of a W3C trace context if it is sampled; else an empty text."""
    context = parse_traceparent(traceparent) if traceparent else None
    return f"{context.trace_id:032x}" if context and context.trace_flags.sampled else ""


if __name__ == "__main__":
    PAGE.write_text(markdown())
    sys.stdout.write(f"{PAGE} written\n")
