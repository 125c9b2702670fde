"""Every tier of a rendered install is restarted pod by pod, under load, and no client notices.

As a Deployment does it: pools without a surge, gateways with one; the next pod when the new one
has been ready for `minReadySeconds`. Half of the clients connect anew for each request, the others
keep one channel; both through a Service, whose connections go to gateways that are ready.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import yaml

from common.types import FinishReason
from gateway.client import AsyncClient, Client, Options
from gateway.types import PeerState
from tests.chart.rendering import named, render
from tests.integration.pods import Node, Pod
from tests.integration.stacks import tiny_model
from tests.integration.streams import asked

pytestmark = [
    pytest.mark.processes,
    pytest.mark.heavy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses"),
]
NUM_CLIENTS = 8
NUM_PODS = 2  # in each of the tiers that are restarted
VALUES = {
    # The tiny model from a claim, in a number format in which all answers are the same; and
    # patience in proportion to its speed.
    "gateway": {
        "replicas": NUM_PODS,
        "settings": {"discovery_seconds": 0.3},
        "preStopSeconds": 2,
        "minReadySeconds": 1,
    },
    "poolDefaults": {
        "model": {"source": "pvc", "claim": "models", "path": "tiny"},
        "dtype": "float32",
        "settings": {"num_kv_tokens": 16384},
        "preStopSeconds": 1,
        "minReadySeconds": 2,
    },
    "targets": {"pools": {"main": {"replicas": NUM_PODS}}},
    "drafts": {"pools": {"model": {"replicas": NUM_PODS}, "ngram": None}},
}


@dataclass
class Load:
    """What the clients have asked and got."""

    expected: list[tuple[int, ...]] = field(default_factory=list)
    num_answers: int = 0
    num_accepted: int = 0
    failures: list[str] = field(default_factory=list)


class Service:
    """The gateways' Service: an address that hands each connection to a pod that is ready."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._turns = itertools.count()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Its address."""
        async with await asyncio.start_server(self._forward, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            yield f"127.0.0.1:{port}"
            server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        gateways = [p for p in self._node.of_component("gateway") if p in self._node.published]
        pod = gateways[next(self._turns) % len(gateways)]  # none: a failure as well
        there = await asyncio.open_connection(pod.host, pod.port)
        await asyncio.gather(_copy(reader, there[1]), _copy(there[0], writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("pods")
    (folder / "cache").mkdir()
    (folder / "models").mkdir()
    tiny_model(folder / "models" / "tiny")
    folders = {
        "/models": str(folder / "models"),
        "/var/cache/tandem": str(folder / "cache"),
        "/tmp": str(folder),
    }
    with Node(render("several-drafts-values", yaml.safe_dump(VALUES)), folder, folders) as node:
        node.wait_until(lambda: _all_know_all(node), "every gateway knows all peers")
        yield node


def _all_know_all(node: Node) -> bool:
    return all(_num_ready_peers(pod) == 2 * NUM_PODS for pod in node.of_component("gateway"))


def _num_ready_peers(pod: Pod) -> int:
    if not pod.probe("readinessProbe"):
        return 0
    with Client(f"{pod.host}:{pod.port}") as client:
        return sum(peer.state is PeerState.READY for peer in client.status().peers)


@pytest.fixture(scope="module")
def load(node: Node) -> Load:
    """The undisturbed texts, undrafted."""
    load = Load()
    (pod, *_) = node.of_component("gateway")
    with Client(f"{pod.host}:{pod.port}") as client:
        for i in range(NUM_CLIENTS):
            prompt, options = _asked(i)
            load.expected.append(client.generate(prompt, options, speculate=False).token_ids)
    assert len(set(load.expected)) == NUM_CLIENTS
    return load


def _asked(i: int) -> tuple[list[int], Options]:
    prompt, options = asked(i)
    return prompt, Options(
        max_tokens=options.max_tokens,
        ignore_eos=True,
        temperature=options.temperature,
        seed=options.seed,
    )


def _restart(node: Node, tier: str, seconds: list[float]) -> None:
    """Replace every pod of a tier's Deployment as its strategy says."""
    workload = node.of_component(tier)[0].workload
    spec = named(node.objects, "Deployment", workload)["spec"]
    surge = spec["strategy"]["rollingUpdate"]["maxSurge"]
    assert (surge, spec["strategy"]["rollingUpdate"]["maxUnavailable"]) in ((0, 1), (1, 0))
    for old in list(node.pods[workload]):
        if not surge:
            seconds.append(node.retire(old))
        new = node.start(workload)
        node.wait_until(partial(Pod.probe, new, "readinessProbe"), f"{workload} is ready")
        time.sleep(spec["minReadySeconds"])
        if surge:
            seconds.append(node.retire(old))
        assert old.exit_code == 0


async def _ask(address: str, i: int, load: Load, over: asyncio.Event) -> None:
    """One client: its request again and again; every other one keeps its channel."""
    prompt, options = _asked(i)
    async with AsyncClient(address) as kept:
        while not over.is_set():
            try:
                if i % 2:
                    answer = await kept.generate(prompt, options)
                else:
                    async with AsyncClient(address) as client:
                        answer = await client.generate(prompt, options)
            except Exception as error:
                load.failures.append(f"client {i}, request {load.num_answers}: {error!r}")
                return
            load.num_answers += 1
            load.num_accepted += answer.finished.speculation.accepted
            if (
                answer.token_ids != load.expected[i]
                or answer.finished.reason is not FinishReason.LENGTH
            ):
                load.failures.append(f"client {i}: another text")


async def _under_load(node: Node, tier: str, load: Load, seconds: list[float]) -> None:
    over = asyncio.Event()
    async with Service(node).served() as address:
        clients = [asyncio.create_task(_ask(address, i, load, over)) for i in range(NUM_CLIENTS)]
        try:
            await asyncio.to_thread(_restart, node, tier, seconds)
        finally:
            over.set()
            await asyncio.gather(*clients)


@pytest.mark.parametrize("tier", ["target", "draft", "gateway"])
def test_a_tier_is_restarted_under_load(
    node: Node, load: Load, tier: str, show: Callable[[str], None]
) -> None:
    before, accepted = load.num_answers, load.num_accepted
    pids = {pod.process.pid for pod in node.of_component(tier)}
    seconds: list[float] = []
    began = time.monotonic()
    asyncio.run(_under_load(node, tier, load, seconds))
    num = load.num_answers - before
    assert load.failures == []
    assert not pids & {pod.process.pid for pod in node.of_component(tier)}
    assert len(seconds) == NUM_PODS
    assert num > 2 * NUM_CLIENTS
    assert load.num_accepted > accepted
    show(
        f"rolling restart: {tier}s in {time.monotonic() - began:.1f} s, {num} answers from"
        f" {NUM_CLIENTS} clients, all alike; stopping took"
        f" {', '.join(f'{s:.1f}' for s in seconds)} s"
    )
