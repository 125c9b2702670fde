"""A node and a kubelet of the tests: rendered pods as real processes on loopback.

Every pod has an address of its own, 127.0.1.N, as pods have. It is started, probed, put into DNS,
and stopped as its manifest says; what has to differ from a cluster is in `Differences`.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from gateway.cli.processes import ServiceProcess
from tests.chart.rendering import (
    CONFIG_PATH,
    NAMESPACE,
    Object,
    config,
    containers,
    named,
    of_kind,
    selects,
)
from tests.integration.nameserver import NameServer
from tests.scrape import free_port

_NUMBERS = itertools.count(10)  # of addresses; none is used twice, as ports linger
PORTS = ("port", "health_port", "metrics_port")


@dataclass(frozen=True)
class Differences:
    """All that a pod is told otherwise here than in a cluster."""

    ports: dict[int, int]  # free ones here, in place of the rendered
    folders: dict[str, str]  # of volumes: where they are mounted, and where they are here
    nameserver: str

    def of_settings(self, settings: dict[str, Any], address: str) -> dict[str, Any]:
        """Settings on an address of loopback."""
        changed = {**settings, "host": address}
        changed |= {key: self.ports[settings[key]] for key in PORTS}
        for key in ("target", "draft"):
            if isinstance(settings.get(key), list):
                changed[key] = [self._of_peer(entry) for entry in settings[key]]
                changed["nameserver"] = self.nameserver
        for key in ("cache_dir", "model"):
            if key in settings:
                changed[key] = self.of_path(settings[key])
        return changed

    def of_path(self, path: str) -> str:
        """A path below a volume."""
        for mounted, here in self.folders.items():
            if path == mounted or path.startswith(mounted + "/"):
                return here + path.removeprefix(mounted)
        return path

    def _of_peer(self, entry: str) -> str:
        name, _, port = entry.rpartition(":")
        return f"{name}:{self.ports[int(port)]}"


class Pod:
    """One pod of a Deployment, as a process."""

    def __init__(
        self, objects: list[Object], deployment: Object, differences: Differences, folder: Path
    ) -> None:
        self.workload: str = deployment["metadata"]["name"]
        self.labels: dict[str, str] = deployment["spec"]["template"]["metadata"]["labels"]
        self.spec: dict[str, Any] = deployment["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.host = f"127.0.1.{next(_NUMBERS)}"
        self.differences = differences
        self.settings = differences.of_settings(config(objects, deployment), self.host)
        self.exit_code: int | None = None
        file = folder / f"{self.workload}-{self.host}.toml"
        file.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in self.settings.items()))
        python, option, module = self.container["command"]
        assert (python, option) == ("python", "-m")
        args = [str(file) if arg == CONFIG_PATH else arg for arg in self.container["args"]]
        env = {e["name"]: differences.of_path(e["value"]) for e in self.container["env"]}
        self.process = ServiceProcess(module, args, env)

    @property
    def port(self) -> int:
        """That it serves on, here."""
        port: int = self.settings["port"]
        return port

    def probe(self, name: str) -> bool:
        """What the kubelet would find: `startupProbe`, `livenessProbe` or `readinessProbe`."""
        asked = self.container[name]
        port = self.differences.ports[asked["grpc"]["port"]]
        with grpc.insecure_channel(f"{self.host}:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=asked["grpc"]["service"])
            try:
                status = stub.Check(request, timeout=asked["timeoutSeconds"]).status
            except grpc.RpcError:
                return False
            return bool(status == health_pb2.HealthCheckResponse.SERVING)

    @property
    def is_ready(self) -> bool:
        """Whether Services stand for it: not so many failures one after the other."""
        failures = self.container["readinessProbe"]["failureThreshold"]
        return any(self.probe("readinessProbe") for _ in range(failures))

    def wait_for(self, name: str, *, seconds: float = 0.0) -> None:
        """Until a probe succeeds; by default as long as the startup probe allows, or 60 s."""
        probe = self.container["startupProbe"]
        allowed = min(60.0, seconds or probe["failureThreshold"] * probe["periodSeconds"])
        deadline = time.monotonic() + allowed
        while not self.probe(name):
            assert self.process.exit_code is None, f"{self.workload} has ended"
            assert time.monotonic() < deadline, f"{self.workload}: no {name} within {allowed} s"
            time.sleep(0.05)

    def terminate(self) -> float:
        """Stop it as the kubelet does; returns the seconds that it took of its grace.

        It fails if the grace is over before the process has ended.
        """
        began = time.monotonic()
        sleep = self.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {})
        time.sleep(sleep.get("seconds", 0))
        left = self.spec["terminationGracePeriodSeconds"] - (time.monotonic() - began)
        self.exit_code = self.process.stop(left)
        took = time.monotonic() - began
        assert self.exit_code != -signal.SIGKILL, f"{self.workload} was killed after {took:.0f} s"
        return took


class Node:
    """Where the pods of one rendered install run, with the DNS of their Services."""

    def __init__(self, objects: list[Object], folder: Path, folders: dict[str, str]) -> None:
        assert sys.platform == "linux"  # which has all of 127.0.0.0/8
        self.objects = objects
        self.pods: dict[str, list[Pod]] = {}  # by Deployment; those that are not stopping
        self.published: set[Pod] = set()  # ready when `publish` last looked
        self._all: list[Pod] = []
        self._folder = folder
        self._stack = ExitStack()
        self._names = NameServer()
        rendered = {p["containerPort"] for _, c in containers(objects) for p in c["ports"]}
        ports = {port: free_port() for port in sorted(rendered)}
        self.differences = Differences(ports, folders, self._names.address)

    def __enter__(self) -> Self:
        self._stack.enter_context(self._names)
        self._stack.callback(self._kill)
        try:
            for deployment, _ in containers(self.objects):
                self.pods[deployment["metadata"]["name"]] = []
                for _ in range(deployment["spec"]["replicas"]):
                    self.start(deployment["metadata"]["name"])
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def _kill(self) -> None:
        for pod in self._all:
            pod.process.kill()

    def start(self, workload: str) -> Pod:
        """A new pod of a Deployment; returns before it is ready."""
        deployment = named(self.objects, "Deployment", workload)
        pod = Pod(self.objects, deployment, self.differences, self._folder)
        self._all.append(pod)
        self.pods[workload].append(pod)
        return pod

    def of_component(self, component: str) -> list[Pod]:
        """The pods of gateways, targets or drafts that are not stopping."""
        pods = itertools.chain.from_iterable(self.pods.values())
        return [p for p in pods if p.labels["app.kubernetes.io/component"] == component]

    def ready(self, service: str) -> list[Pod]:
        """Those that a Service stands for: selected by it, and ready."""
        selector = named(self.objects, "Service", service)["spec"]["selector"]
        pods = itertools.chain.from_iterable(self.pods.values())
        return [p for p in pods if selects(selector, p.labels) and p.is_ready]

    def publish(self) -> None:
        """Let Services stand for the pods that are ready now, and DNS tell of headless ones."""
        hosts: dict[str, list[str]] = {}
        published: set[Pod] = set()
        for service in of_kind(self.objects, "Service"):
            name = service["metadata"]["name"]
            pods = self.ready(name)
            published |= set(pods)
            if service["spec"].get("clusterIP") == "None":
                hosts[f"{name}.{NAMESPACE}.svc.cluster.local"] = [pod.host for pod in pods]
        self._names.hosts, self.published = hosts, published

    def retire(self, pod: Pod) -> float:
        """Take a pod out of DNS and stop it, as when it is deleted; seconds that it took."""
        self.pods[pod.workload].remove(pod)
        self.publish()
        return pod.terminate()

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        """Publishing what is ready meanwhile."""
        deadline = time.monotonic() + 180
        while not holds():
            assert time.monotonic() < deadline, f"not within 180 s: {what}"
            for pod in self._all:
                assert pod.process.exit_code in (None, 0), f"{pod.workload} has failed"
            self.publish()
            time.sleep(0.1)
        self.publish()
