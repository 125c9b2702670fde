"""Every tier of a rendered install is restarted pod by pod, under load, and no client notices.

As a Deployment does it: pools without a surge, gateways with one; the next pod when the new one
has been ready for `minReadySeconds`. Half of the clients connect anew for each request, to one of
the gateways that are ready; the others keep one channel to a Service, which hands each connection
to one of those.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
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


def _ready(node: Node, turn: int) -> Pod:
    """One of the gateways that are ready; none: a failure as well."""
    gateways = [pod for pod in node.of_component("gateway") if pod in node.published]
    return gateways[turn % len(gateways)]


@contextlib.asynccontextmanager
async def _service(node: Node) -> AsyncIterator[str]:
    """An address whose connections end at gateways that were ready when they were made."""
    turns, both_ways = itertools.count(), set[asyncio.Task[None]]()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pod = _ready(node, next(turns))
        reader_there, writer_there = await asyncio.open_connection(pod.host, pod.port)
        for way in (_copy(reader, writer_there), _copy(reader_there, writer)):
            both_ways.add(asyncio.create_task(way))

    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*both_ways)  # which end with their clients
    assert next(turns) > 0  # it was used


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


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


@contextlib.asynccontextmanager
async def _channels(
    node: Node, i: int, service: str
) -> AsyncIterator[Callable[[], AbstractAsyncContextManager[AsyncClient]]]:
    """What gives client i its channel for a request: a new one, or the same again and again."""
    if i % 2:
        async with AsyncClient(service) as kept:
            yield lambda: contextlib.nullcontext(kept)
    else:
        pods = (_ready(node, turn) for turn in itertools.count(i))
        yield lambda: AsyncClient("{0.host}:{0.port}".format(next(pods)))


async def _ask(node: Node, i: int, service: str, load: Load, over: asyncio.Event) -> None:
    """One client: its request again and again."""
    prompt, options = _asked(i)
    async with _channels(node, i, service) as channel:
        while not over.is_set():
            try:
                async with channel() as client:
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
    async with _service(node) as service:
        clients = [
            asyncio.create_task(_ask(node, i, service, load, over)) for i in range(NUM_CLIENTS)
        ]
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
