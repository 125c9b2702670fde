"""Peers that come and go as a name's addresses do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import dns.asyncresolver
import dns.name
import dns.resolver
import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import parse
from common.errors import ConfigurationError, NotFoundError, UnavailableError
from common.types import Draining
from gateway.api import GatewayServicer, add_to_server
from gateway.cli import render
from gateway.client import AsyncClient
from gateway.config import GatewayConfig
from gateway.discovery import Answer, Entry, Source, difference, follow, joined, read_entry, wanted
from gateway.relay import Relay
from gateway.resolver import Resolver
from gateway.types import PeerState, PeerStatus
from tests.gateway.fakes import (
    TARGET_MODEL,
    FakeDraft,
    FakeTarget,
    ending,
    until,
    verdicts,
)
from tests.integration.nameserver import NameServer
from tests.scrape import text_of, value

addresses = st.sets(st.sampled_from("abcdefgh"))


def found(*hosts: str) -> Answer:
    return Answer("A", frozenset(hosts))


# -- entries -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("10.0.0.4:7071", Entry("10.0.0.4:7071", 7071)),
        ("dns:7071", Entry("dns:7071", 7071)),  # a host of that name
        ("[0:0::1]:07071", Entry("[::1]:7071", 7071)),
        ("dns:large:7071", Entry("dns:large:7071", 7071, "large")),
        ("dns:Large_1.ns.svc.:7071", Entry("dns:large_1.ns.svc.:7071", 7071, "large_1.ns.svc.")),
    ],
)
def test_entries(text: str, entry: Entry) -> None:
    assert read_entry(text, "--target") == entry


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--target=dns:large"], '--target: is "dns:large", must be dns:NAME:PORT'),
        (["--target=dns::1"], '--target: is "dns::1", must be dns:NAME:PORT'),
        (["--target=dns:a..b:1"], '--target: is "dns:a..b:1", must be dns:NAME:PORT'),
        (["--target=dns:-a:1"], '--target: is "dns:-a:1", must be dns:NAME:PORT'),
        (
            [f"--target=dns:{'a' * 64}:1"],
            f'--target: is "dns:{"a" * 64}:1", must be dns:NAME:PORT',
        ),
        (
            ["--draft=a:1,dns:b:65536"],
            '--draft[1]: is "dns:b:65536", must be dns:NAME:PORT with a port from 1 to 65535',
        ),
        (
            ["--target=dns:10.0.0.4:7071"],
            '--target: is "dns:10.0.0.4:7071", which holds an address, not a name:'
            ' leave out "dns:"',
        ),
        (
            ["--target=dns:[::1]:7071"],
            '--target: is "dns:[::1]:7071", which holds an address, not a name: leave out "dns:"',
        ),
        (
            ["--target=dns:a:1,dns:A:1"],
            '--target[1]: is "dns:A:1", which is there already',
        ),
        (
            ["--target=[::1]:1,[0::1]:1"],
            '--target[1]: is "[0::1]:1", which is there already',
        ),
        (["--nameserver=10.0.0.1"], '--nameserver: is "10.0.0.1", must be HOST:PORT'),
        (
            ["--nameserver=ns:53"],
            '--nameserver: is "ns:53", must be ADDRESS:PORT, such as 10.96.0.10:53: a name server'
            " can't be looked up itself",
        ),
        (["--discovery-seconds=0"], "--discovery-seconds: is 0.0, must be above 0"),
    ],
)
def test_wrong_entries_are_refused_by_name(args: list[str], says: str) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(GatewayConfig, args)
    assert caught.value.code == f"tandem gateway: {says}"


def test_a_name_may_stand_beside_addresses() -> None:
    config = parse(
        GatewayConfig, ["--target=a:1, dns:b:1", "--draft=dns:c:2", "--nameserver=[::1]:53"]
    )
    assert [entry.name for entry in config.target_entries] == ["", "b"]
    assert config.draft_entries == (Entry("dns:c:2", 2, "c"),)


# -- which peers there should be -----------------------------------------------------------


def test_a_failed_lookup_changes_nothing_and_an_empty_answer_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "gateway.discovery")
    source = Source(read_entry("dns:large:7071", ""))
    assert (source.addresses, source.vacancy) == ([], "not looked up yet")
    source.learn([Answer("A", failure="SERVFAIL"), Answer("AAAA", failure="SERVFAIL")])
    assert (source.addresses, source.vacancy) == ([], "the lookup has failed: SERVFAIL")
    source.learn([found("10.0.0.2", "10.0.0.1"), Answer("AAAA", frozenset(["2001:db8:0::1"]))])
    both = ["10.0.0.1:7071", "10.0.0.2:7071", "[2001:db8::1]:7071"]
    assert (source.addresses, source.vacancy, source.failure) == (both, "", "")
    for _ in range(3):
        source.learn([Answer("A", failure="no answer"), Answer("AAAA", failure="no answer")])
        assert (source.addresses, source.vacancy, source.failure) == (both, "", "no answer")
    source.learn([Answer("A"), Answer("AAAA", failure="no answer")])  # each kind by itself
    assert source.addresses == both[2:]
    source.learn([Answer("A"), Answer("AAAA")])
    assert (source.addresses, source.vacancy) == ([], "the name has no address")
    assert [record.getMessage() for record in caplog.records] == [
        "dns:large:7071: lookup failed, addresses stay: SERVFAIL",
        "dns:large:7071: lookups work again",
        "dns:large:7071: lookup failed, addresses stay: no answer",
        "dns:large:7071: lookups work again",
    ]


def test_an_address_that_several_entries_name_is_one_peer() -> None:
    sources = [Source(read_entry(t, "")) for t in ("dns:a:7", "10.0.0.1:7", "dns:b:7", "dns:a:8")]
    for source in sources:
        source.learn([found("10.0.0.1", "10.0.0.2")] if source.entry.name else [])
    assert wanted(sources) == {
        "10.0.0.1:7": "dns:a:7",
        "10.0.0.2:7": "dns:a:7",
        "10.0.0.1:8": "dns:a:8",
        "10.0.0.2:8": "dns:a:8",
    }
    sources[0].learn([found()])
    sources[2].learn([found()])
    assert wanted(sources[:3]) == {"10.0.0.1:7": "10.0.0.1:7"}  # the fixed one stays


@given(addresses, addresses)
def test_a_difference_leads_from_what_is_to_what_is_wanted(one: set[str], two: set[str]) -> None:
    change = difference(one, dict.fromkeys(two, "dns:x:1"))
    assert not set(change.new) & one
    assert not set(change.gone) & two
    assert (one | set(change.new)) - set(change.gone) == two


def test_addresses_are_joined_in_one_form() -> None:
    assert joined("10.0.0.1", 7) == "10.0.0.1:7"
    assert joined("2001:0db8::0:1", 7) == "[2001:db8::1]:7"


def test_a_lookup_that_fails_by_our_fault_is_not_the_last(
    caplog: pytest.LogCaptureFixture,
) -> None:
    heard: list[Sequence[Answer]] = []
    num = 0

    async def lookup(name: str) -> Sequence[Answer]:
        nonlocal num
        num += 1
        if num == 2:
            raise ValueError("what is this")
        return [found(f"{name}{num}")]

    async def main() -> None:
        task = asyncio.create_task(follow("x", lookup, 0.01, heard.append))
        await until(lambda: len(heard) == 3)
        task.cancel()

    asyncio.run(main())
    assert heard == [[found("x1")], [found("x3")], [found("x4")]]
    assert "fault in a lookup of x" in caplog.text


# -- name servers --------------------------------------------------------------------------


def test_what_name_servers_say() -> None:
    both = ["10.0.0.1", "10.0.0.2", "2001:db8::1"]
    many = [f"10.0.1.{i}" for i in range(100)]
    hosts = {"large": both, "four": both[:2], "none": [], "in.svc.test": both, "many": many}
    with NameServer(hosts) as server:
        resolver = Resolver(server.address, lookup_seconds=0.4)

        def ask(name: str) -> dict[str, Answer]:
            return {answer.kind: answer for answer in asyncio.run(resolver.lookup(name))}

        assert ask("large") == {
            "A": found(*both[:2]),
            "AAAA": Answer("AAAA", frozenset(both[2:])),
        }
        assert ask("four") == {"A": found(*both[:2]), "AAAA": Answer("AAAA")}
        assert ask("many")["A"] == found(*many)  # over TCP
        empty = {"A": Answer("A"), "AAAA": Answer("AAAA")}
        assert ask("none") == empty
        assert ask("no.such.name") == empty
        assert ask("in") == empty
        resolver._resolver.search = [dns.name.from_text("svc.test")]  # of resolv.conf
        assert ask("in")["A"] == found(*both[:2])
        server.mode = "servfail"
        assert ask("large")["A"] == Answer("A", failure="SERVFAIL")
        server.mode = "silent"
        began = time.monotonic()
        silence = "no name server has answered within 0.4 s"
        assert ask("large") == {kind: Answer(kind, failure=silence) for kind in empty}
        assert time.monotonic() - began < 2
        server.mode = "ok"
        assert ask("large")["A"] == found(*both[:2])


def test_without_a_name_server_the_flag_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_file(*_: Any, **__: Any) -> None:
        raise dns.resolver.NoResolverConfiguration

    monkeypatch.setattr(dns.asyncresolver.Resolver, "read_resolv_conf", no_file)
    with pytest.raises(ConfigurationError, match="--nameserver: is empty, must be ADDRESS:PORT"):
        Resolver()
    Resolver("127.0.0.1:53")


# -- a gateway whose peers come and go -----------------------------------------------------


@dataclass
class Names:
    """What a fake lookup answers."""

    hosts: dict[str, list[str]] = field(default_factory=dict)
    failure: str = ""
    num_asked: int = 0

    async def lookup(self, name: str) -> Sequence[Answer]:
        self.num_asked += 1
        if self.failure:
            return [Answer("A", failure=self.failure)]
        return [found(*self.hosts.get(name, ()))]


@dataclass
class Town:
    """A gateway, fake targets and drafts on loopback addresses, and the names."""

    relay: Relay
    client: AsyncClient
    names: Names
    targets: list[FakeTarget]
    drafts: list[FakeDraft]

    def name(self, targets: Sequence[int], drafts: Sequence[int] = ()) -> None:
        """Let the names stand for these."""
        self.names.hosts = {
            "large": [self.targets[i].host for i in targets],
            "small": [self.drafts[i].host for i in drafts],
        }

    async def looked_up(self) -> None:
        """All names have been looked up since."""
        num = self.names.num_asked
        await until(lambda: self.names.num_asked >= num + 4)

    def ready(self) -> list[str]:
        return sorted(p.address for p in self.relay.status() if p.state is PeerState.READY)

    async def until_ready(self, *peers: FakeTarget | FakeDraft) -> None:
        hosts = sorted(peer.address for peer in peers)
        await until(lambda: self.ready() == hosts, f"ready {hosts}")

    def of(self, peer: FakeTarget | FakeDraft) -> PeerStatus | None:
        return next((p for p in self.relay.status() if p.address == peer.address), None)

    def read(self, metric: str, **labels: str) -> float:
        return value(text_of(self.relay.metrics.metrics), metric, **labels)


def in_town(
    test: Callable[[Town], Awaitable[None]],
    *,
    targets: Sequence[int] = (0,),
    drafts: Sequence[int] = (),
    fixed: Sequence[int] = (),
    **settings: Any,
) -> None:
    """Run a test in a gateway that knows its peers by name; it begins with some of each."""
    if sys.platform != "linux":
        pytest.skip("needs several loopback addresses")

    async def main() -> None:
        async with town(targets, drafts, fixed, **settings) as t:
            await test(t)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def town(
    targets: Sequence[int], drafts: Sequence[int], fixed: Sequence[int], **settings: Any
) -> AsyncIterator[Town]:
    all_targets = [FakeTarget(), FakeTarget(), FakeTarget()]
    all_drafts = [FakeDraft(), FakeDraft()]
    for fakes in (all_targets, all_drafts):
        for i, fake in enumerate(fakes):
            fake.host, fake.port = f"127.0.0.{2 + i}", fakes[0].port
            await fake.start()
    names = Names()
    fixed_targets = [all_targets[i].address for i in fixed]
    config = GatewayConfig(
        target=",".join([*fixed_targets, f"dns:large:{all_targets[0].port}"]),
        draft=f"dns:small:{all_drafts[0].port}" if drafts else "",
        discovery_seconds=0.02,
        **settings,
    )
    relay = Relay(config, names.lookup)
    server = grpc.aio.server()
    add_to_server(GatewayServicer(config, relay), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            t = Town(relay, client, names, all_targets, all_drafts)
            t.name(targets, drafts)
            relay.start()
            begun = {*targets, *fixed}
            await t.until_ready(*(all_targets[i] for i in begun), *(all_drafts[i] for i in drafts))
            yield t
    finally:
        await relay.stop()
        await server.stop(None)
        for peer in (*all_targets, *all_drafts):
            await peer.stop()


def test_a_new_address_is_used_and_one_that_is_gone_finishes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(t: Town) -> None:
        caplog.set_level(logging.INFO, "gateway.roster")
        first, second, _ = t.targets
        first.script = ["hel"]
        second.script = [ending("fine")]
        told = t.of(first)
        assert told is not None
        assert told.detail == f"from dns:large:{first.port}"
        console = render.console()
        with console.capture() as shown:
            console.print(render.status(await t.client.status()))
        assert "dns:large" in shown.get()
        call = asyncio.create_task(t.client.generate("ab"))
        await until(lambda: first.opens)
        t.name([1])
        await t.until_ready(second)
        told = t.of(first)
        assert told is not None
        assert (told.state, told.num_sequences) == (PeerState.DRAINING, 1)
        assert told.detail == f"gone from dns:large:{first.port}"
        assert t.read("target_available", model="tiny") == 1
        for _ in range(3):
            assert (await t.client.generate("ab")).text == "fine"
        assert len(first.opens) == 1
        first.say(*verdicts(first.opens[0], ["hel", ending("lo")])[1:])
        answer = await call
        assert (answer.text, answer.finished.usage.delivered) == ("hello", 5)
        await until(lambda: t.of(first) is None, "the end of the first")
        assert first.closes == []  # it had ended, so there was nothing to close
        await until(lambda: first.num_open_streams == 0, "the end of its stream")
        place = f"target at {first.address}"
        assert [m for m in caplog.messages if place in m] == [
            f"{place}: gone from dns:large:{first.port}, finishes 1",
            f"{place}: connection closed",
        ]
        assert f"target at {second.address}: new from dns:large:{first.port}" in caplog.messages
        await t.looked_up()
        assert first.num_streams == 1

    in_town(test)


def test_one_that_is_back_before_it_has_ended_is_used_again() -> None:
    async def test(t: Town) -> None:
        first, second, _ = t.targets
        call = asyncio.create_task(t.client.generate("ab"))
        await until(lambda: first.opens)
        t.name([1])
        await t.until_ready(second)
        t.name([0])
        await t.until_ready(first)
        first.script = [ending("more")]
        assert (await t.client.generate("ab")).text == "more"
        first.say(*verdicts(first.opens[0], [ending("hello")]))
        assert (await call).text == "hello"
        assert (first.num_streams, len(first.opens), len(second.opens)) == (1, 2, 0)
        await until(lambda: t.of(second) is None)
        t.name([0, 1])  # and again after its channel has closed
        await t.until_ready(first, second)
        assert (first.num_streams, second.num_streams) == (1, 2)

    in_town(test)


def test_a_failed_lookup_leaves_the_peers_as_they_are() -> None:
    async def test(t: Town) -> None:
        first, second, third = t.targets
        assert t.read("discovery_failing") == 0
        t.names.failure = "SERVFAIL"
        t.name([2])
        await until(lambda: t.read("discovery_failing", peer="target") == 1)
        await t.looked_up()
        assert t.ready() == sorted([first.address, second.address])
        first.script = second.script = [ending("fine")]
        assert (await t.client.generate("ab")).text == "fine"
        t.names.failure = ""
        await t.until_ready(third)
        assert t.read("discovery_failing") == 0
        await until(lambda: len(t.relay.status()) == 1)

    in_town(test, targets=(0, 1))


def test_without_an_address_requests_are_told_to_come_back() -> None:
    async def test(t: Town) -> None:
        (first, _, _), entry = t.targets, f"dns:large:{t.targets[0].port}"
        await until(lambda: "peer_round_trip_seconds{" in text_of(t.relay.metrics.metrics))
        t.name([])
        await until(lambda: t.of(first) is None)
        (told,) = t.relay.status()
        assert (told.address, told.state) == (entry, PeerState.CONNECTING)
        for model in ("", "tiny"):
            with pytest.raises(UnavailableError) as caught:
                await t.client.generate("ab", model=model)
            assert caught.value.retry_after_seconds
            assert f"no target is ready: {entry}: the name has no address" in str(caught.value)
        with pytest.raises(NotFoundError):
            await t.client.generate("ab", model="other")
        assert t.read("target_available", model="tiny") == 0
        assert "peer_round_trip_seconds{" not in text_of(t.relay.metrics.metrics)
        t.name([1])
        t.targets[1].script = [ending("fine")]
        await t.until_ready(t.targets[1])
        assert (await t.client.generate("ab", model="tiny")).text == "fine"
        assert t.read("target_available", model="tiny") == 1

    in_town(test)


def test_another_model_may_come_under_the_name() -> None:
    """What the last target served is forgotten with the first that serves another model."""

    async def test(t: Town) -> None:
        t.targets[1].model = replace(TARGET_MODEL, name="other", weights_fingerprint="w2")
        t.targets[1].script = [ending("fine")]
        t.name([])
        await until(lambda: t.of(t.targets[0]) is None)
        t.name([1])
        await t.until_ready(t.targets[1])
        assert (await t.client.generate("ab")).started.model == "other"
        with pytest.raises(NotFoundError):
            await t.client.generate("ab", model="tiny")

    in_town(test)


def test_a_gateway_starts_before_its_targets_have_addresses() -> None:
    async def test(t: Town) -> None:
        waiting = asyncio.create_task(t.relay.wait_for_target())
        await t.looked_up()
        assert not waiting.done()
        t.name([2])
        async with asyncio.timeout(10):
            await waiting

    in_town(test, targets=())


def test_an_address_that_is_configured_as_well_is_one_peer_and_stays() -> None:
    async def test(t: Town) -> None:
        first, second, _ = t.targets
        assert first.num_streams == 1
        t.name([])
        await until(lambda: t.of(second) is None)
        await t.looked_up()
        told = t.of(first)
        assert told is not None
        assert (told.state, told.detail) == (PeerState.READY, "")
        assert first.num_streams == 1

    in_town(test, targets=(0, 1), fixed=(0,))


def test_a_lost_target_that_is_gone_is_not_dialled_again() -> None:
    async def test(t: Town) -> None:
        first, second, _ = t.targets
        call = asyncio.create_task(t.client.generate("ab"))
        await until(lambda: first.opens)
        t.name([1])
        await t.until_ready(second)
        second.script = [ending("hello")]
        await first.stop()
        assert (await call).text == "hello"
        assert second.opens[0].resumed
        await until(lambda: t.of(first) is None)
        await first.start()
        await t.looked_up()
        assert first.num_streams == 1

    in_town(test)


def test_one_that_is_gone_and_then_stops_moves_what_it_has() -> None:
    """A pod that ends leaves the name, and is told to stop, in either order."""

    async def test(t: Town) -> None:
        first, second, _ = t.targets
        call = asyncio.create_task(t.client.generate("ab"))
        await until(lambda: first.opens)
        t.name([1])
        await t.until_ready(second)
        await t.looked_up()
        assert not second.opens
        second.script = [ending("hello")]
        first.say(Draining(0.2))
        assert (await call).text == "hello"
        await until(lambda: t.of(first) is None)
        assert first.closes == [first.opens[0].sequence_id]

    in_town(test)


def test_one_that_is_back_when_its_model_no_longer_fits_is_not_used() -> None:
    async def test(t: Town) -> None:
        first, second, _ = t.targets
        second.model = replace(TARGET_MODEL, weights_fingerprint="w2")
        second.script = [ending("new")]
        call = asyncio.create_task(t.client.generate("ab"))
        await until(lambda: first.opens)
        t.name([1])
        await t.until_ready(second)
        t.name([0, 1])
        await until(lambda: "connects anew" in str(t.of(first)))
        assert (await t.client.generate("ab")).text == "new"
        first.say(*verdicts(first.opens[0], [ending("old")]))
        assert (await call).text == "old"
        await until(lambda: (p := t.of(first)) is not None and p.state is PeerState.MISMATCHED)
        assert "weights_fingerprint" in str(t.of(first))

    in_town(test)


def test_drafts_come_and_go() -> None:
    async def test(t: Town) -> None:
        target, (first, second) = t.targets[0], t.drafts
        call = asyncio.create_task(t.client.generate("ab"))
        await until(lambda: first.opens)
        t.name([0], [0, 1])
        await t.until_ready(target, first, second)
        assert not second.opens
        t.name([0], [1])  # as one that drains it is left at once, since there is another one
        await until(lambda: second.opens, "the attachment to the other draft")
        await until(lambda: t.of(first) is None)
        assert first.closes == [first.opens[0].sequence_id]
        t.name([0], [])
        await t.until_ready(target)
        assert t.read("draft_available", model="tiny") == 0
        assert (p := t.of(second)) is not None
        assert p.num_sequences == 1  # nobody else could draft for it, so it goes on
        target.say(*verdicts(target.opens[0], ["x"]))
        await until(lambda: second.commits)
        target.say(*verdicts(target.opens[0], ["x", ending("y")])[1:])
        answer = await call
        assert answer.started.max_lookahead == GatewayConfig.lookahead
        await until(lambda: t.of(second) is None)
        target.script = [ending("fine")]
        undrafted = await t.client.generate("ab")
        assert undrafted.started.max_lookahead == GatewayConfig.lookahead  # a draft may come

    in_town(test, drafts=(0,))
