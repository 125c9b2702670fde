"""Peers found by name, in real processes: they come and go, and the gateway is never restarted.

Two targets of the tiny model and an n-gram draft, on loopback addresses of their own and one
port, as pods have them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from common.errors import UnavailableError
from gateway.cli.processes import ServiceProcess, share_cores
from gateway.client import AsyncClient, Client
from gateway.types import PeerState, PeerStatus
from tests.integration.nameserver import NameServer
from tests.integration.stacks import tiny_model
from tests.integration.streams import Heard, assert_same, listen
from tests.scrape import free_port, scrape, value

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="needs several loopback addresses"),
]
HOSTS = ("127.0.0.2", "127.0.0.3")
NUM_STREAMS = 4


@dataclass
class Town:
    """A gateway that knows its peers by name."""

    names: NameServer
    gateway: ServiceProcess
    metrics_port: int
    target_port: int
    draft_port: int

    def place(self, host: str) -> str:
        return f"{host}:{self.target_port}"

    def peers(self) -> dict[str, PeerStatus]:
        with Client(self.gateway.address) as client:
            return {peer.address: peer for peer in client.status().peers}

    def until(self, holds: Callable[[dict[str, PeerStatus]], bool]) -> dict[str, PeerStatus]:
        """What the gateway says of its peers, as soon as it is this."""
        deadline = time.monotonic() + 20
        while not holds(peers := self.peers()):
            assert time.monotonic() < deadline, peers
            time.sleep(0.02)
        return peers

    def until_failing(self, num: int) -> None:
        """So many names can't be looked up."""
        deadline = time.monotonic() + 20
        while (told := value(scrape(self.metrics_port), "discovery_failing")) != num:
            assert time.monotonic() < deadline, told
            time.sleep(0.02)

    def name(self, *targets: str, drafts: tuple[str, ...] = HOSTS[:1]) -> None:
        """Let the names stand for these, and wait until just these are ready."""
        self.names.hosts = {"large.test": list(targets), "small.test": list(drafts)}
        wanted = {self.place(t) for t in targets} | {f"{d}:{self.draft_port}" for d in drafts}
        self.until(lambda p: {a for a in p if p[a].state is PeerState.READY} == wanted)

    def run(
        self,
        disturb: Callable[[list[Heard]], Awaitable[None]] | None = None,
        speculate: bool = True,
    ) -> list[Heard]:
        """Streams side by side; `disturb` is called when each of them has had some tokens."""
        all_heard = [Heard() for _ in range(NUM_STREAMS)]

        async def main() -> None:
            async with AsyncClient(self.gateway.address) as client:
                streams = [
                    asyncio.create_task(listen(client, i, heard, speculate))
                    for i, heard in enumerate(all_heard)
                ]
                if disturb is not None:
                    async with asyncio.timeout(30):
                        while min(len(h.token_ids) for h in all_heard) < 3:  # noqa: ASYNC110
                            await asyncio.sleep(0.002)
                    await disturb(all_heard)
                await asyncio.gather(*streams)

        asyncio.run(main())
        return all_heard


@pytest.fixture(scope="module")
def town(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    cores, last_core = share_cores()
    target_port, draft_port, metrics_port = free_port(), free_port(), free_port()
    with ExitStack() as stack:

        def start(module: str, *args: str) -> ServiceProcess:
            process = ServiceProcess(module, args)
            stack.callback(process.kill)
            stack.callback(process.terminate)
            return process

        names = stack.enter_context(NameServer())
        gateway = start(
            "gateway",
            "--port=0",
            f"--cores={last_core}",
            f"--target=dns:large.test:{target_port}",
            f"--draft=dns:small.test:{draft_port}",
            f"--nameserver={names.address}",
            "--discovery-seconds=0.1",
            f"--metrics-port={metrics_port}",
        )
        kind = [f"--cores={cores}", f"--model={model}", "--dtype=float32"]
        services = [
            start("target_service", f"--host={host}", f"--port={target_port}", *kind)
            for host in HOSTS
        ]
        at = [f"--host={HOSTS[0]}", f"--port={draft_port}", f"--cores={last_core}"]
        services.append(start("draft_service", *at, "--drafter=ngram"))
        for service in services:
            service.wait_until_serving(60)
        assert names.num_asked > 0
        assert (gateway.address, gateway.exit_code) == ("", None)  # it waits for an address
        names.hosts = {"large.test": [HOSTS[0]]}
        gateway.wait_until_serving(20)
        yield Town(names, gateway, metrics_port, target_port, draft_port)


@pytest.fixture(scope="module")
def expected(town: Town) -> list[Heard]:
    """What each stream gives undrafted, at the first target."""
    town.name(HOSTS[0])
    return town.run(speculate=False)


def test_a_new_address_takes_its_share(town: Town, expected: list[Heard]) -> None:
    town.name(*HOSTS)
    held: list[int] = []

    async def look(_: list[Heard]) -> None:
        peers = await asyncio.to_thread(town.peers)
        held.extend(peers[town.place(host)].num_sequences for host in HOSTS)

    assert_same(town.run(look), expected)
    assert held == [NUM_STREAMS // 2] * 2
    assert f"from dns:large.test:{town.target_port}" in town.peers()[town.place(HOSTS[1])].detail


def test_one_that_leaves_finishes_what_it_has(town: Town, expected: list[Heard]) -> None:
    town.name(*HOSTS)
    gone = town.place(HOSTS[0])

    async def leave(all_heard: list[Heard]) -> None:
        await asyncio.to_thread(town.name, HOSTS[1])
        peers = await asyncio.to_thread(town.peers)
        assert peers[gone].state is PeerState.DRAINING
        assert peers[gone].num_sequences == NUM_STREAMS // 2
        async with AsyncClient(town.gateway.address) as client:
            await client.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
        assert sum(heard.finished is not None for heard in all_heard) < NUM_STREAMS

    heard = town.run(leave)
    assert_same(heard, expected)
    assert not any("moved" in h.kinds() for h in heard)
    town.until(lambda peers: gone not in peers)
    assert value(scrape(town.metrics_port), "target_available") == 1


def test_a_name_server_that_fails_changes_nothing(town: Town, expected: list[Heard]) -> None:
    town.name(*HOSTS)
    town.names.mode = "servfail"
    town.names.hosts = {}
    town.until_failing(2)
    num_asked, deadline = town.names.num_asked, time.monotonic() + 20
    while town.names.num_asked < num_asked + 12:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert [p.state for p in town.peers().values()] == [PeerState.READY] * 3
    assert_same(town.run(), expected)
    town.names.hosts = {"large.test": list(HOSTS), "small.test": [HOSTS[0]]}
    town.names.mode = "ok"
    town.name(*HOSTS)
    town.until_failing(0)


def test_all_leave_and_come_back(town: Town, expected: list[Heard]) -> None:
    town.name(drafts=())
    town.until(lambda peers: len(peers) == 2)  # the names, without an address
    with Client(town.gateway.address) as client:
        with pytest.raises(UnavailableError, match="the name has no address") as caught:
            client.generate([5, 6, 7], max_tokens=3)
        assert caught.value.retry_after_seconds
        assert value(scrape(town.metrics_port), "target_available") == 0
        town.name(HOSTS[1])
        assert len(client.generate([5, 6, 7], max_tokens=3, ignore_eos=True).token_ids) == 3
    assert_same(town.run(), expected)
