"""The table of metrics, the registry made from it, and the port that it is read at."""

from __future__ import annotations

from pathlib import Path

import pytest

import common
from common.config import ServiceConfig, parse
from common.errors import ConfigurationError
from common.metric_table import EVERY, METRICS, OWNERS, PREFIX, Kind, by_series_name, markdown
from common.metrics import PAGE, Metrics, MetricsServer, sampled_trace_id, serve
from tests.scrape import exposed_names, free_port, owned_names, samples, scrape, text_of, value


def test_the_page_is_fresh() -> None:
    assert PAGE.read_text() == markdown(), "run python -m common.metrics"


def test_every_name_has_one_owner_and_says_its_unit() -> None:
    names = [m.name for m in METRICS]
    assert len(set(names)) == len(names)
    assert len(by_series_name()) == sum(len(m.series_names) for m in METRICS)
    for m in METRICS:
        assert m.owner in (*OWNERS, EVERY)
        assert (m.kind is Kind.COUNTER) == m.name.endswith("_total"), m.name
        assert (m.kind is Kind.HISTOGRAM) == bool(m.buckets), m.name
        assert m.help.endswith("."), m.name


@pytest.mark.parametrize("service", OWNERS)
def test_a_service_exposes_what_it_owns_and_nothing_else(service: str) -> None:
    metrics = Metrics(service)
    metrics.of("m")
    assert exposed_names(text_of(metrics)) == owned_names(service)
    assert value(text_of(metrics), "build_info", version=common.__version__, service=service) == 1


def test_every_series_is_there_from_the_start_and_knows_its_pool() -> None:
    metrics = Metrics("target", pool="blue")
    metrics.of("m")
    text = text_of(metrics)
    assert {s.labels["pool"] for s in samples(text)} == {"blue"}
    assert value(text, "stale_proposals_total", reason="late", model="m") == 0
    before = len(list(samples(text)))
    metrics.of("m").add("stale_proposals_total", 2, "late")
    assert len(list(samples(text_of(metrics)))) == before
    with pytest.raises(KeyError):
        metrics.of("m").add("stale_proposals_total", 1, "no such cause")


def test_many_registries_live_side_by_side() -> None:
    one, other = Metrics("draft"), Metrics("draft")
    one.of("m").add("draft_tokens_total", 3)
    other.of("m").add("draft_tokens_total", 4)
    assert value(text_of(one), "draft_tokens_total") == 3
    assert value(text_of(other), "draft_tokens_total") == 4


def test_figures_can_be_read_when_they_are_asked_for() -> None:
    metrics, live = Metrics("gateway"), 1
    assert "num_live_requests{" not in text_of(metrics)
    metrics.at_scrape(lambda: [("num_live_requests", {"model": "m"}, live)])
    assert value(text_of(metrics), "num_live_requests") == 1
    live = 2
    assert value(text_of(metrics), "num_live_requests", pool="default", model="m") == 2
    metrics.at_scrape(lambda: [("spans_dropped_total", {}, 5)])
    assert value(text_of(metrics), "spans_dropped_total", service="gateway") == 5


def test_exemplars_are_told_in_the_openmetrics_format() -> None:
    metrics = Metrics("gateway")
    metrics.of("m").observe("e2e_request_latency_seconds", 0.3, "ab" * 16)
    server = MetricsServer(metrics.registry, "127.0.0.1", 0)
    try:
        assert f'# {{trace_id="{"ab" * 16}"}} 0.3' in scrape(server.port, open_metrics=True)
        plain = scrape(server.port)
        assert "trace_id" not in plain
        assert "_created" not in plain
        assert value(plain, "e2e_request_latency_seconds_count") == 1
    finally:
        server.close()


def test_the_port_is_off_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert serve(ServiceConfig(), Metrics("target")) is None
    port = free_port()
    server = serve(ServiceConfig(metrics_port=port), Metrics("target"))
    assert server is not None
    try:
        assert f"tells metrics on http://127.0.0.1:{port}/metrics" in capsys.readouterr().out
        assert PREFIX + "step_seconds" in scrape(port)
        with pytest.raises(ConfigurationError, match=r"--metrics-port: .* can't be bound"):
            serve(ServiceConfig(metrics_port=port), Metrics("target"))
    finally:
        server.close()


def test_flags() -> None:
    config = parse(ServiceConfig, ["--metrics-port=9", "--pool=blue", "--log-format=json"])
    assert (config.metrics_port, config.pool, config.log_format) == (9, "blue", "json")


@pytest.mark.parametrize(
    ("traceparent", "expected"),
    [
        (f"00-{'ab' * 16}-{'cd' * 8}-01", "ab" * 16),
        (f"00-{'ab' * 16}-{'cd' * 8}-03", "ab" * 16),
        (f"00-{'ab' * 16}-{'cd' * 8}-00", ""),
        ("", ""),
        ("nonsense", ""),
        ("a-b-c-d-e", ""),
        ("a-b-c-?", ""),
    ],
)
def test_only_sampled_traces_become_exemplars(traceparent: str, expected: str) -> None:
    assert sampled_trace_id(traceparent) == expected


def test_the_page_is_linked_to_its_source() -> None:
    assert "metric_table.py" in Path(PAGE).read_text()
