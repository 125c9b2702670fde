"""What the pods of the rendered workloads are told and given, for each install of ci/."""

from __future__ import annotations

import pytest
import yaml

from common.service import FLUSH_SECONDS
from tests.chart.rendering import (
    INSTALLS,
    config,
    containers,
    named,
    of_kind,
    render,
)

installs = pytest.mark.parametrize("install", INSTALLS)


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
