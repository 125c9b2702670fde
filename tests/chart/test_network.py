"""Who reaches whom, by the rules that a network plugin would apply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.chart.rendering import INSTALLS, Object, config, of_kind, render, selects

ELSEWHERE: dict[str, str] = {"app": "something-else"}
installs = pytest.mark.parametrize("install", INSTALLS)


def _peer_fits(peer: dict[str, Any], labels: dict[str, str], namespace: str) -> bool:
    """Whether a pod in a namespace is one of a rule's peers; own: the release's namespace."""
    if "ipBlock" in peer:
        return False  # addresses are not given to pods here
    wanted = (peer.get("namespaceSelector") or {}).get("matchLabels")
    if wanted is None and namespace != "own":
        return False
    if (
        wanted is not None
        and not wanted.items() <= {"kubernetes.io/metadata.name": namespace}.items()
    ):
        return False
    pods = (peer.get("podSelector") or {}).get("matchLabels", {})
    return not pods or selects(pods, labels)


def _allows(
    rules: list[dict[str, Any]], side: str, port: int, labels: dict[str, str], namespace: str
) -> bool:
    for rule in rules:
        ports = [p["port"] for p in rule.get("ports", ())]
        if ports and port not in ports:
            continue
        if side not in rule or any(_peer_fits(p, labels, namespace) for p in rule[side]):
            return True
    return False


def _policies(objects: list[Object], labels: dict[str, str]) -> list[dict[str, Any]]:
    specs = [policy["spec"] for policy in of_kind(objects, "NetworkPolicy")]
    return [s for s in specs if selects(s["podSelector"]["matchLabels"], labels)]


def _enters(
    objects: list[Object], to: dict[str, str], port: int, labels: dict[str, str], namespace: str
) -> bool:
    policies = _policies(objects, to)
    assert policies
    return any(_allows(p["ingress"], "from", port, labels, namespace) for p in policies)


def _leaves(
    objects: list[Object], labels: dict[str, str], port: int, to: dict[str, str], namespace: str
) -> bool:
    policies = _policies(objects, labels)
    assert policies
    return any(_allows(p["egress"], "to", port, to, namespace) for p in policies)


def _pods(objects: list[Object]) -> dict[str, tuple[dict[str, str], dict[str, Any]]]:
    """Labels and settings of each workload's pods."""
    return {
        d["metadata"]["name"]: (d["spec"]["template"]["metadata"]["labels"], config(objects, d))
        for d in of_kind(objects, "Deployment")
    }


@installs
def test_only_gateways_reach_pools(install: str) -> None:
    objects = render(install)
    pods = _pods(objects)
    for to, (labels, settings) in pods.items():
        port = settings["port"]
        for name, (own, _) in pods.items():
            reached = _enters(objects, labels, port, own, "own") and _leaves(
                objects, own, port, labels, "own"
            )
            assert reached == (name.endswith("-gateway") and not to.endswith("-gateway")), (
                name,
                to,
            )
        if not to.endswith("-gateway"):
            for namespace in ("own", "monitoring", "another"):
                assert not _enters(objects, labels, port, ELSEWHERE, namespace)


def test_clients_reach_gateways_and_can_be_narrowed_down() -> None:
    for install, expected in (("minimal-cpu-values", True), ("everything-on-values", False)):
        objects = render(install)
        (gateway,) = (pod for name, pod in _pods(objects).items() if name.endswith("-gateway"))
        labels, settings = gateway
        assert _enters(objects, labels, settings["port"], ELSEWHERE, "another") is expected
        (smoke,) = of_kind(objects, "Pod")
        assert _enters(objects, labels, settings["port"], smoke["metadata"]["labels"], "own")


@installs
def test_metrics_are_scraped_from_one_namespace(install: str) -> None:
    objects = render(install)
    for labels, settings in _pods(objects).values():
        port = settings["metrics_port"]
        assert _enters(objects, labels, port, ELSEWHERE, "monitoring")
        assert not _enters(objects, labels, port, ELSEWHERE, "another")


@installs
def test_what_leaves_a_pod(install: str) -> None:
    objects = render(install)
    traced = install == "everything-on-values"
    for labels, settings in _pods(objects).values():
        assert _leaves(objects, labels, 53, {"k8s-app": "kube-dns"}, "kube-system")
        fetches = "/" in settings.get("model", "") and not settings["model"].startswith("/")
        assert _leaves(objects, labels, 443, ELSEWHERE, "another") == fetches
        assert _leaves(objects, labels, 4317, ELSEWHERE, "observability") == traced
        assert not _leaves(objects, labels, 4317, ELSEWHERE, "another")
        assert not _leaves(objects, labels, 80, ELSEWHERE, "another")


def test_without_a_namespace_the_collector_may_be_anywhere() -> None:
    values = "telemetry: {otlpEndpoint: 'http://collector.example.com:14317'}"
    objects = render("minimal-cpu-values", values)
    for labels, _ in _pods(objects).values():
        assert _leaves(objects, labels, 14317, ELSEWHERE, "another")


def test_there_is_none_if_told_so() -> None:
    assert not of_kind(
        render("minimal-cpu-values", "networkPolicy: {enabled: false}"), "NetworkPolicy"
    )
