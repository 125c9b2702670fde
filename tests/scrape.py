"""Reads what services expose, in tests."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_open_metrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from common.metric_table import PREFIX, owned_by
from common.metrics import Metrics


def text_of(metrics: Metrics, *, open_metrics: bool = False) -> str:
    """What a scrape would bring."""
    if open_metrics:
        text: bytes = generate_open_metrics(metrics.registry)  # type: ignore[no-untyped-call]
        return text.decode()
    return generate_latest(metrics.registry).decode()


def scrape(port: int, *, host: str = "127.0.0.1", open_metrics: bool = False) -> str:
    """What a process on this machine tells."""
    accept = "application/openmetrics-text; version=1.0.0" if open_metrics else "text/plain"
    url = f"http://{host}:{port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        text: bytes = response.read()
    return text.decode()


def samples(text: str) -> Iterator[Sample]:
    """Ours, out of the text format."""
    families = text_string_to_metric_families(text)
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                yield sample


def value(text: str, name: str, **labels: str) -> float:
    """Sum over the series of a metric that have these labels."""
    found = [
        s.value
        for s in samples(text)
        if s.name == PREFIX + name and labels.items() <= s.labels.items()
    ]
    assert found, f"{name} {labels} is not exposed"
    return float(sum(found))


def exposed_names(text: str) -> set[str]:
    """Names of our metrics, in the text format."""
    lines = (line.split() for line in text.splitlines() if line.startswith("# TYPE " + PREFIX))
    return {line[2].removeprefix(PREFIX) for line in lines}


def owned_names(service: str) -> set[str]:
    """Names that a service should expose."""
    return {m.name for m in owned_by(service)}


def free_port() -> int:
    """A port that was free just now."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port: int = s.getsockname()[1]
        return port
