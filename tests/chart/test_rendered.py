"""What the chart renders for each install of ci/: valid, complete, and consistent in itself."""

from __future__ import annotations

import functools
import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes_validate import utils

from common.service import FLUSH_SECONDS
from tests.chart.rendering import (
    CHART,
    INSTALLS,
    Object,
    config,
    containers,
    helm,
    named,
    of_kind,
    render,
    selects,
    values_file,
)

KUBERNETES = ("1.30", "1.34", "1.37")
OF_OPERATORS = {"PodMonitor", "PrometheusRule", "ScaledObject"}  # no schema; tested by themselves
installs = pytest.mark.parametrize("install", INSTALLS)


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))
        yield


@installs
def test_helm_finds_nothing_to_complain_of(install: str) -> None:
    command = [helm(), "lint", "--strict", str(CHART), "--values", str(values_file(install))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@installs
@pytest.mark.parametrize("version", KUBERNETES)
def test_the_schemas_of_kubernetes_hold(install: str, version: str) -> None:
    objects = [o for o in render(install) if o["kind"] not in OF_OPERATORS]
    assert len(objects) >= 15
    for o in objects:
        assert kubernetes_validate.validate(o, version, strict=True) == version


def test_the_schemas_would_find_a_mistake() -> None:
    deployment = of_kind(render("minimal-cpu-values"), "Deployment")[0]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["lifecycle"]["preStop"]["sleep"]["secnds"] = 5
    with pytest.raises(kubernetes_validate.ValidationError, match="secnds"):
        kubernetes_validate.validate(deployment, KUBERNETES[0], strict=True)


def test_there_are_the_installs_that_are_promised() -> None:
    promised = {"minimal-cpu", "two-gpu-pools", "several-drafts", "everything-on"}
    assert {name.removesuffix("-values") for name in INSTALLS} == promised


@installs
def test_names_are_used_once_and_fit(install: str) -> None:
    for release in ("t", "r" * 53):
        objects = render(install, "fullnameOverride: ''", release)
        names = [(o["kind"], o["metadata"]["name"]) for o in objects]
        assert max(Counter(names).values()) == 1
        assert max(len(name) for _, name in names) <= 63


def _selectors(objects: list[Object]) -> Iterator[tuple[str, dict[str, str]]]:
    """Every label selector of this chart's own pods, with the place it was found at."""

    def walk(value: Any, place: str) -> Iterator[tuple[str, dict[str, str]]]:
        if isinstance(value, dict):
            labels = value.get("matchLabels") or {}
            if "app.kubernetes.io/name" in labels:
                yield place, labels
            for key, inner in value.items():
                yield from walk(inner, f"{place}.{key}")
        elif isinstance(value, list):
            for i, inner in enumerate(value):
                yield from walk(inner, f"{place}[{i}]")

    for o in objects:
        place = f"{o['kind']} {o['metadata']['name']}"
        yield from walk(o, place)
        if o["kind"] == "Service":
            yield place, o["spec"]["selector"]


def _pod_labels(objects: list[Object]) -> list[dict[str, str]]:
    deployments = of_kind(objects, "Deployment")
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in deployments]
    return pods + [pod["metadata"]["labels"] for pod in of_kind(objects, "Pod")]


@installs
def test_two_releases_in_a_namespace_do_not_touch(install: str) -> None:
    one = render(install, "fullnameOverride: ''", "one")
    other = render(install, "fullnameOverride: ''", "one-more")
    names = [{(o["kind"], o["metadata"]["name"]) for o in objects} for objects in (one, other)]
    assert not names[0] & names[1]
    for own, foreign in ((one, other), (other, one)):
        places = list(_selectors(own))
        assert len(places) > 10
        for place, selector in places:
            assert any(selects(selector, labels) for labels in _pod_labels(own)), place
            assert not any(selects(selector, labels) for labels in _pod_labels(foreign)), place


@installs
def test_a_workload_is_selected_by_its_own_objects_only(install: str) -> None:
    objects = render(install)
    kinds = {"Service": 0, "PodDisruptionBudget": 0, "NetworkPolicy": 0}
    for o in objects:
        if o["kind"] not in kinds:
            continue
        spec = o["spec"]
        selector = spec["selector"] if o["kind"] == "Service" else None
        selector = selector or spec.get("podSelector", spec.get("selector"))["matchLabels"]
        selected = [
            d["metadata"]["name"]
            for d in of_kind(objects, "Deployment")
            if selects(selector, d["spec"]["template"]["metadata"]["labels"])
        ]
        assert selected == [o["metadata"]["name"]]
        kinds[o["kind"]] += 1
    num_workloads = len(of_kind(objects, "Deployment"))
    num_budgets = num_workloads - (install == "everything-on-values")  # one has none, for the test
    assert kinds == {
        "Service": num_workloads,
        "PodDisruptionBudget": num_budgets,
        "NetworkPolicy": num_workloads,
    }


@installs
def test_every_port_is_named_and_probed(install: str) -> None:
    objects = render(install)
    for deployment, container in containers(objects):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert len(ports) == len(container["ports"]) == len(set(ports.values()))
        settings = config(objects, deployment)
        assert ports == {
            "grpc": settings["port"],
            "health": settings["health_port"],
            "metrics": settings["metrics_port"],
        }
        pool = "tandem/pool" in deployment["metadata"]["labels"]
        asked = {
            name: container[name]["grpc"]
            for name in ("startupProbe", "livenessProbe", "readinessProbe")
        }
        assert {probe["port"] for probe in asked.values()} == {ports["health"]}
        assert {name: probe["service"] for name, probe in asked.items()} == {
            "startupProbe": "ready" if pool else "live",
            "livenessProbe": "live",
            "readinessProbe": "ready",
        }
        service = named(objects, "Service", deployment["metadata"]["name"])["spec"]
        (port,) = service["ports"]
        assert (port["name"], port["targetPort"]) == ("grpc", "grpc")
        if pool:
            assert service["clusterIP"] == "None"
            assert service["publishNotReadyAddresses"] is False
            assert port["port"] == ports["grpc"]


@installs
def test_a_pod_outlives_its_drain_and_its_load(install: str) -> None:
    objects = render(install)
    for deployment, container in containers(objects):
        spec = deployment["spec"]["template"]["spec"]
        sleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {"seconds": 0})
        drain = config(objects, deployment)["drain_seconds"]
        assert spec["terminationGracePeriodSeconds"] > sleep["seconds"] + drain + FLUSH_SECONDS
        probe = container["startupProbe"]
        load = probe["failureThreshold"] * probe["periodSeconds"]
        spec = deployment["spec"]
        assert spec["progressDeadlineSeconds"] > load + spec["minReadySeconds"]


@installs
def test_pools_are_replaced_without_a_surge_unless_told(install: str) -> None:
    objects = render(install)
    for deployment in of_kind(objects, "Deployment"):
        pool = deployment["metadata"]["labels"].get("tandem/pool")
        expected = {"maxSurge": 0, "maxUnavailable": 1}
        if pool is None or pool == "volume":  # a gateway; the pool that says otherwise
            expected = {"maxSurge": 1, "maxUnavailable": 0}
        assert deployment["spec"]["strategy"]["rollingUpdate"] == expected


@installs
def test_what_a_pod_needs_is_there(install: str) -> None:
    objects = render(install)
    for deployment, container in containers(objects):
        spec = deployment["spec"]["template"]["spec"]
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes.keys() == {mount["name"] for mount in container["volumeMounts"]}
        written = {m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")}
        needed = {"/tmp"} | ({"/var/cache/tandem"} if "cache" in volumes else set())
        assert written - {"/scratch"} == needed
        assert next(e["value"] for e in container["env"] if e["name"] == "HOME") in needed
        account = named(objects, "ServiceAccount", spec["serviceAccountName"])
        assert account["automountServiceAccountToken"] is False
        assert spec["automountServiceAccountToken"] is False
        assert spec["enableServiceLinks"] is False
        assert spec["securityContext"]["runAsUser"] == 65532
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for constraint in spec["topologySpreadConstraints"]:
            assert constraint["labelSelector"] == deployment["spec"]["selector"]
    assert not {"Secret", "Role", "ClusterRole"} & {o["kind"] for o in objects}


@installs
def test_gateways_look_for_every_pool(install: str) -> None:
    objects = render(install)
    (gateway,) = (
        d for d in of_kind(objects, "Deployment") if d["metadata"]["name"].endswith("-gateway")
    )
    settings = config(objects, gateway)
    for tier in ("target", "draft"):
        expected = {
            f"dns:{d['metadata']['name']}.llm.svc.cluster.local.:{config(objects, d)['port']}"
            for d in of_kind(objects, "Deployment")
            if d["metadata"]["labels"]["app.kubernetes.io/component"] == tier
        }
        assert expected
        found = set(settings[tier])
        assert expected <= found
        extra = {"target": {"10.20.0.4:7071"}, "draft": {"dns:drafts.elsewhere:7072"}}[tier]
        assert found - expected == (extra if install == "everything-on-values" else set())


def test_a_gpu_pool_asks_for_its_gpus_and_uses_them() -> None:
    objects = render("two-gpu-pools-values")
    pools = [(d, c) for d, c in containers(objects) if d["metadata"]["name"] != "tandem-gateway"]
    assert len(pools) == 2
    for deployment, container in pools:
        assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
        assert config(objects, deployment)["device"] == "cuda"
        assert deployment["spec"]["template"]["spec"]["runtimeClassName"] == "nvidia"
        assert container["image"].endswith("-cuda")
    ((_, gateway),) = (
        (d, c) for d, c in containers(objects) if d["metadata"]["name"] == "tandem-gateway"
    )
    assert "nvidia.com/gpu" not in gateway["resources"]["limits"]


@pytest.mark.parametrize(
    ("resources", "threads"),
    [
        ("{limits: {cpu: 1500m}, requests: {cpu: 8}}", 2),
        ("{requests: {cpu: 3}}", 3),
        ("{requests: {cpu: '0.5'}}", 1),
        ("{}", None),
    ],
)
def test_threads_are_what_the_container_may_use(resources: str, threads: int | None) -> None:
    objects = render("", f"targets: {{pools: {{main: {{resources: {resources}}}}}}}")
    settings = config(objects, named(objects, "Deployment", "tandem-target-main"))
    assert settings.get("threads") == threads


def test_settings_reach_the_service_as_they_were_written() -> None:
    own = {"max_rows": 12345678, "objective": 'a "quoted" text\n<é>', "watermark": 1e-7}
    own |= {"prefix_cache": False, "age_seconds": 2.5, "listed": ["a", "b"], "threads": 9}
    values = yaml.safe_dump({"targets": {"pools": {"main": {"settings": own}}}})
    objects = render("minimal-cpu-values", values)
    settings = config(objects, named(objects, "Deployment", "tandem-target-main"))
    assert own.items() <= settings.items()
    assert type(settings["max_rows"]) is int


def test_a_changed_setting_restarts_its_own_pods_only() -> None:
    def checksums(values: str) -> dict[str, str]:
        objects = of_kind(render("several-drafts-values", values), "Deployment")
        annotations = {
            d["metadata"]["name"]: d["spec"]["template"]["metadata"]["annotations"] for d in objects
        }
        return {name: found["checksum/config"] for name, found in annotations.items()}

    before = checksums("")
    after = checksums("drafts: {pools: {ngram: {settings: {max_ngram: 5}}}}")
    assert len(before) == 4
    assert {name for name in before if before[name] != after[name]} == {"tandem-draft-ngram"}


def test_a_pool_that_a_later_file_empties_is_gone() -> None:
    objects = render("several-drafts-values", "drafts: {pools: {ngram: null}}")
    names = {d["metadata"]["name"] for d in of_kind(objects, "Deployment")}
    assert names == {"tandem-gateway", "tandem-target-main", "tandem-draft-model"}


def test_models_come_from_where_they_are_said_to() -> None:
    objects = render("everything-on-values")
    hub, volume = (
        named(objects, "Deployment", f"everything-target-{name}") for name in ("hub", "volume")
    )
    settings = config(objects, hub)
    assert (settings["model"], settings["model_name"]) == ("Qwen/Qwen3-8B", "qwen")
    pod = hub["spec"]["template"]["spec"]
    (secret,) = (v["secret"] for v in pod["volumes"] if v["name"] == "hub-token")
    (mount,) = (m for m in pod["containers"][0]["volumeMounts"] if m["name"] == "hub-token")
    assert settings["hub_token_file"] == f"{mount['mountPath']}/{secret['items'][0]['path']}"
    assert secret["secretName"] == "hub-token"
    settings = config(objects, volume)
    assert (settings["model"], settings["device"]) == ("/models/qwen3-8b", "cuda")
    pod = volume["spec"]["template"]["spec"]
    claims = {
        v["name"]: v["persistentVolumeClaim"]
        for v in pod["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert claims["models"] == {"claimName": "models", "readOnly": True}
    assert claims["cache"] == {"claimName": "tandem-cache"}
    offline = [
        {"name": "HF_HUB_OFFLINE", "value": "1"}
        in d["spec"]["template"]["spec"]["containers"][0]["env"]
        for d in (hub, volume)
    ]
    assert offline == [False, True]


def test_the_smoke_test_asks_the_gateway() -> None:
    objects = render("minimal-cpu-values")
    (pod,) = of_kind(objects, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    service = named(objects, "Service", "tandem-gateway")
    assert container["args"][1] == f"tandem-gateway:{service['spec']['ports'][0]['port']}"
    compile(container["args"][0], "smoke", "exec")
    (gateway,) = (c for d, c in containers(objects) if d["metadata"]["name"] == "tandem-gateway")
    assert container["image"] == gateway["image"]


def test_the_dashboard_is_that_of_files() -> None:
    data = named(render("everything-on-values"), "ConfigMap", "everything-dashboard")["data"]
    written = json.loads((CHART / "files" / "dashboard.json").read_text())
    assert json.loads(data["tandem.json"]) == written
