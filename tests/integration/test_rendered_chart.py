"""The rendered chart runs: one install's pods as real processes, probed and stopped as it says.

Commands, environment, config.toml, probes and grace are those of ci/several-drafts-values.yaml:
a gateway, two targets and a model draft with the packaged model, an n-gram draft. What differs
from a cluster is in `pods.Differences`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.types import FinishReason
from gateway.client import Client, Delta, Finished, Message, Options
from gateway.types import PeerKind, PeerState
from tests.chart.rendering import of_kind, render
from tests.integration.pods import Node, Pod
from tests.integration.stacks import packaged_model
from tests.scrape import scrape, value

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(240),
    pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses"),
]
QUICK = "gateway: {preStopSeconds: 0}\npoolDefaults: {preStopSeconds: 1}\n"  # 5 s by default
GREEDY = Options(ignore_eos=True, temperature=0.0)
PROMPT = [Message("user", "Repeat this line three times: the quick brown fox jumps over it.")]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("pods")
    cache = Path(packaged_model()).parent.parent  # converted once for all tests
    folders = {"/var/cache/tandem": str(cache), "/tmp": str(folder)}
    with Node(render("several-drafts-values", QUICK), folder, folders) as node:
        yield node


def test_probes_answer_as_the_manifests_ask(node: Node, show: Callable[[str], None]) -> None:
    """Live at once, ready when the model is loaded and, at the gateway, a target is met."""
    began = time.monotonic()
    pods = [pod for pods in node.pods.values() for pod in pods]
    assert [len(node.of_component(c)) for c in ("gateway", "target", "draft")] == [1, 2, 2]
    for pod in pods:
        pod.wait_for("livenessProbe")
    (gateway,) = node.of_component("gateway")
    assert not gateway.probe("readinessProbe")  # no name has an address yet
    gateway.wait_for("startupProbe", seconds=1.0)
    for pod in node.of_component("target"):
        pod.wait_for("startupProbe")
        assert pod.probe("readinessProbe")
    assert not gateway.probe("readinessProbe")
    node.wait_until(lambda: all(pod.probe("readinessProbe") for pod in pods), "all pods are ready")
    show(f"chart: 5 pods ready after {time.monotonic() - began:.1f} s")


def test_a_client_gets_a_drafted_answer(node: Node, show: Callable[[str], None]) -> None:
    (gateway,) = node.ready("tandem-gateway")
    with Client(f"{gateway.host}:{gateway.port}") as client:
        node.wait_until(
            lambda: sum(p.state is PeerState.READY for p in client.status().peers) == 4,
            "the gateway has found both targets and both drafts",
        )
        peers = client.status().peers
        assert {(p.kind, p.address) for p in peers} == {
            (PeerKind[pod.labels["app.kubernetes.io/component"].upper()], f"{pod.host}:{pod.port}")
            for component in ("target", "draft")
            for pod in node.of_component(component)
        }
        answers = [
            client.generate(PROMPT, GREEDY, max_tokens=32, speculate=speculate)
            for speculate in (False, True, True, True)
        ]
    assert len({answer.token_ids for answer in answers}) == 1
    accepted = [answer.finished.speculation.accepted for answer in answers]
    assert accepted[0] == 0
    assert sum(accepted) > 0
    show(f"chart: {accepted[1:]} draft tokens accepted of {len(answers[0].token_ids)} each")


def test_the_smoke_test_passes(node: Node) -> None:
    """Its own words, at the gateway's address here."""
    (pod,) = of_kind(node.objects, "Pod")
    (container,) = pod["spec"]["containers"]
    python, option = container["command"]
    script, address = container["args"]
    assert (python, option, address) == ("python", "-c", "tandem-gateway:7070")
    (gateway,) = node.ready("tandem-gateway")
    here = f"{gateway.host}:{gateway.port}"
    done = subprocess.run([sys.executable, "-c", script, here], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "SmolLM2-135M-Instruct: 8 tokens" in done.stdout


def test_metrics_are_where_the_monitor_looks(node: Node) -> None:
    for pods in node.pods.values():
        for pod in pods:
            told = scrape(pod.settings["metrics_port"], host=pod.host)
            service = pod.labels["app.kubernetes.io/component"]
            pool = pod.labels.get("tandem/pool", "gateway")
            assert value(told, "build_info", service=service, pool=pool) == 1


def test_sigterm_ends_every_pod_within_its_grace(node: Node, show: Callable[[str], None]) -> None:
    """The gateway under a stream, which it finishes: no longer ready, but live until then."""
    (gateway,) = node.of_component("gateway")
    seen: set[tuple[bool, bool]] = set()
    took: dict[str, float] = {}
    with Client(f"{gateway.host}:{gateway.port}") as client:
        stream = client.stream(PROMPT, GREEDY, max_tokens=120)
        next(event for event in stream if isinstance(event, Delta))
        stopping = threading.Thread(target=_retire, args=(node, gateway, took))
        stopping.start()
        finished = None
        for event in stream:
            if isinstance(event, Finished):
                finished = event
            seen.add((gateway.probe("livenessProbe"), gateway.probe("readinessProbe")))
        stopping.join()
    assert finished is not None
    assert finished.reason is FinishReason.LENGTH
    assert (True, False) in seen  # told to stop, at work
    others = [*node.of_component("draft"), *node.of_component("target")]
    threads = [threading.Thread(target=_retire, args=(node, pod, took)) for pod in others]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [pod.exit_code for pod in (gateway, *others)] == [0] * 5
    assert len(took) == 5
    show(f"chart: stopped after {', '.join(f'{s:.1f}' for s in took.values())} s, preStop included")


def _retire(node: Node, pod: Pod, took: dict[str, float]) -> None:
    took[pod.host] = node.retire(pod)
