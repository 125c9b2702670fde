"""What the chart renders for each install of ci/: valid, complete, and consistent in itself."""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubernetes_validate import utils

from tests.chart.rendering import (
    CHART,
    INSTALLS,
    Object,
    containers,
    helm,
    named,
    of_kind,
    render,
    selects,
    template,
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


@installs
def test_the_notes_name_what_is_there(install: str) -> None:
    command = [helm(), "install", "tandem", str(CHART), "--namespace", "llm", "--dry-run=client"]
    done = subprocess.run(
        [*command, "--values", str(values_file(install))],
        env=os.environ | {"KUBECONFIG": os.devnull},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    objects = render(install)
    for deployment in of_kind(objects, "Deployment"):
        name = deployment["metadata"]["name"]
        number = deployment["spec"].get("replicas", r"\d+ to \d+")
        assert re.search(rf"^  {name}: {number} pods$", notes, re.MULTILINE)
    (gateway,) = (
        s for s in of_kind(objects, "Service") if s["metadata"]["name"].endswith("-gateway")
    )
    address = f"{gateway['metadata']['name']}.llm:{gateway['spec']['ports'][0]['port']}"
    assert address in notes
    assert f"service/{gateway['metadata']['name']} 7070:" in notes


def test_the_package_renders_the_same(tmp_path: Path) -> None:
    """What is left out of it is not missed."""
    done = subprocess.run([helm(), "package", str(CHART), "--destination", str(tmp_path)])
    assert done.returncode == 0
    (package,) = tmp_path.iterdir()
    command = [helm(), "template", "tandem", str(package), "--namespace", "llm"]
    command += ["--values", str(values_file("everything-on-values"))]
    rendered = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert rendered == template("everything-on-values")
    with tarfile.open(package) as files:
        assert not [name for name in files.getnames() if "/ci/" in name or "/files/tests/" in name]
