"""What scales, scrapes and traces the rendered services."""

from __future__ import annotations

import re

import pytest
import yaml

from common import telemetry
from common.metric_table import Kind, by_series_name
from tests.chart.rendering import (
    CHART,
    INSTALLS,
    Object,
    config,
    containers,
    named,
    of_kind,
    render,
    selects,
)

installs = pytest.mark.parametrize("install", INSTALLS)


def _scaled(objects: list[Object]) -> dict[str, Object]:
    """Autoscalers of either kind by the Deployment that they scale."""
    scalers = [*of_kind(objects, "HorizontalPodAutoscaler"), *of_kind(objects, "ScaledObject")]
    found = {s["spec"]["scaleTargetRef"]["name"]: s for s in scalers}
    assert len(found) == len(scalers)  # never two on one
    return found


@installs
def test_autoscalers_have_a_deployment_that_leaves_the_number_to_them(install: str) -> None:
    objects = render(install)
    scaled = _scaled(objects)
    for scaler in scaled.values():
        reference = scaler["spec"]["scaleTargetRef"]
        assert (reference["apiVersion"], reference["kind"]) == ("apps/v1", "Deployment")
        named(objects, "Deployment", reference["name"])
    for deployment in of_kind(objects, "Deployment"):
        assert ("replicas" in deployment["spec"]) != (deployment["metadata"]["name"] in scaled)
    assert bool(scaled) == (install == "everything-on-values")


def _metrics(scaler: Object) -> dict[str, str]:
    """Metric -> average a pod, whichever kind asks for it."""
    spec = scaler["spec"]
    if scaler["kind"] == "HorizontalPodAutoscaler":
        pods = [metric["pods"] for metric in spec["metrics"]]
        assert {p["target"]["type"] for p in pods} == {"AverageValue"}
        return {p["metric"]["name"]: p["target"]["averageValue"] for p in pods}
    found = {}
    for trigger in spec["triggers"]:
        assert (trigger["type"], trigger["metricType"]) == ("prometheus", "AverageValue")
        about = trigger["metadata"]
        assert about["serverAddress"] == "http://prometheus:9090"
        (name,) = re.findall(r"\btandem_\w+", about["query"])
        found[name] = about["threshold"]
    return found


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_scaling_asks_for_gauges_that_the_workload_exposes(kind: str) -> None:
    on = {
        kind: {
            "enabled": True,
            **({"serverAddress": "http://prometheus:9090"} if kind == "keda" else {}),
        }
    }
    values = {"poolDefaults": {"autoscaling": on}, "gateway": {"autoscaling": on}}
    objects = render("several-drafts-values", yaml.safe_dump(values))
    scaled = _scaled(objects)
    assert len(scaled) == 4
    for name, scaler in scaled.items():
        deployment = named(objects, "Deployment", name)
        component = deployment["metadata"]["labels"]["app.kubernetes.io/component"]
        metrics = _metrics(scaler)
        assert metrics
        for metric, average in metrics.items():
            known = by_series_name()[metric]
            assert (known.owner, known.kind) == (component, Kind.GAUGE)
            assert float(average) > 0


def test_keda_counts_the_pods_of_one_pool_only() -> None:
    (scaler,) = of_kind(render("everything-on-values"), "ScaledObject")
    queries = [t["metadata"]["query"] for t in scaler["spec"]["triggers"]]
    for query in queries:
        labels = dict(re.findall(r'(\w+)=~?"([^"]*)"', query))
        assert (labels["namespace"], labels["pool"]) == ("llm", "hub")
        pattern = re.compile(labels["pod"])
        assert pattern.fullmatch("everything-target-hub-5d4f8b7c9-x2x4z")
        assert not pattern.fullmatch("everything-draft-hub-5d4f8b7c9-x2x4z")


def test_the_monitor_finds_every_service_and_only_services() -> None:
    objects = render("everything-on-values")
    (monitor,) = of_kind(objects, "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for deployment, container in containers(objects):
        pod = deployment["spec"]["template"]["metadata"]["labels"]
        assert selects(monitor["spec"]["selector"]["matchLabels"], pod)
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports[endpoint["port"]] == config(objects, deployment)["metrics_port"]


def test_the_rules_are_those_of_files() -> None:
    (rule,) = of_kind(render("everything-on-values"), "PrometheusRule")
    written = [
        group
        for name in ("records", "alerts")
        for group in yaml.safe_load((CHART / "files" / f"{name}.yaml").read_text())["groups"]
    ]
    assert rule["spec"]["groups"] == written
    for group in written:
        for entry in group["rules"]:
            for name in re.findall(r"\btandem_\w+", entry["expr"]):
                assert name in by_series_name()


@installs
def test_traces_go_where_the_values_say(install: str) -> None:
    objects = render(install)
    for _, container in containers(objects):
        environ = {e["name"]: e.get("value", "") for e in container["env"]}
        tracing = telemetry.from_environment("target", _expanded(environ))
        try:
            if install != "everything-on-values":
                assert not any(name.startswith("OTEL_") for name in environ)
                assert tracing.begin("request", "SERVER", "") is None
                continue
            assert environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == "http://collector.observability:4317"
            attributes = tracing.resource.attributes
            assert attributes["k8s.pod.name"] == "value-of-POD_NAME"
            assert attributes["k8s.namespace.name"] == "value-of-POD_NAMESPACE"
            assert attributes["k8s.node.name"] == "value-of-NODE_NAME"
            sampled = sum(tracing.begin("request", "SERVER", "") is not None for _ in range(2000))
            assert 40 < sampled < 180  # 5 %; below 1e-8 to miss
        finally:
            tracing.shutdown(0.0)


def _expanded(environ: dict[str, str]) -> dict[str, str]:
    """As the kubelet does: a variable from the downward API has a value; $(NAME) is replaced."""
    told = {name: value or f"value-of-{name}" for name, value in environ.items()}
    return {
        name: re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], value)
        for name, value in told.items()
    }
