"""Metrics of real processes: names, bounds, and agreement with what clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from common.errors import TandemError
from common.metric_table import OWNERS
from common.types import StaleCounts
from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient, Finished
from tests.gateway.fakes import until
from tests.integration.stacks import tiny_model
from tests.models import VOCAB
from tests.scrape import exposed_names, free_port, owned_names, samples, scrape, value

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@dataclass
class House:
    """Three processes and where each tells its metrics."""

    stack: LocalStack
    ports: dict[str, int]

    def read(self, service: str) -> str:
        return scrape(self.ports[service])

    def series(self) -> set[tuple[str, str, frozenset[tuple[str, str]]]]:
        return {
            (service, s.name, frozenset(s.labels.items()))
            for service in OWNERS
            for s in samples(self.read(service))
        }


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    ports = {service: free_port() for service in OWNERS}

    def flags(service: str) -> list[str]:
        return [f"--metrics-port={ports[service]}", "--pool=blue"]

    with LocalStack(
        model=model,
        target_args=flags("target"),
        draft_args=[*flags("draft"), "--min-ngram=1"],
        gateway_args=[*flags("gateway"), "--max-live-requests=64"],
    ) as stack:
        yield House(stack, ports)


def _prompt(rng: random.Random) -> list[int]:
    words = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 5))]
    return words * rng.randrange(1, 6)


async def _finish(client: AsyncClient, i: int, **options: Any) -> Finished:
    rng = random.Random(i)
    async for event in client.stream(
        _prompt(rng),
        temperature=rng.choice([0.0, 0.3, 1.0]),
        seed=i,
        max_tokens=rng.randrange(1, 60),
        lookahead=rng.choice([0, 1, 4, 8]),
        ignore_eos=rng.random() < 0.5,
        **options,
    ):
        if isinstance(event, Finished):
            return event
    raise AssertionError("no end")


def _sums(finals: list[Finished]) -> Counter[str]:
    sums: Counter[str] = Counter()
    for f in finals:
        spent, usage = f.speculation, f.usage
        sums.update(
            tested=spent.tested,
            accepted=spent.accepted,
            stale=spent.stale,
            drafted=spent.drafted,
            delivered=usage.delivered,
            discarded=usage.discarded,
            prompt=usage.prompt,
            steps=spent.steps,
            undrafted=spent.undrafted_steps,
        )
        for place, num in enumerate(spent.accepted_per_position):
            sums[f"place {place}"] += num
    return sums


def test_final_events_and_metrics_agree_to_the_token(
    house: House, show: Callable[[str], None]
) -> None:
    async def ask() -> list[Finished]:
        async with AsyncClient(house.stack.gateway_address) as client:
            limit = asyncio.Semaphore(8)

            async def one(i: int) -> Finished:
                async with limit:
                    return await _finish(client, i)

            return list(await asyncio.gather(*(one(i) for i in range(60))))

    finals = asyncio.run(ask())
    sums = _sums(finals)
    assert sums["accepted"] > 0
    assert sums["tested"] > sums["accepted"]
    target, gateway = house.read("target"), house.read("gateway")
    assert value(target, "spec_decode_num_draft_tokens_total") == sums["tested"]
    assert value(target, "spec_decode_num_accepted_tokens_total") == sums["accepted"]
    assert value(target, "spec_decode_num_drafts_total") == sums["steps"] - sums["undrafted"]
    assert value(target, "committed_tokens_total") == sums["delivered"] + sums["discarded"]
    causes = {c: value(target, "stale_proposals_total", reason=c) for c in StaleCounts._fields}
    assert sum(causes.values()) == sums["stale"]
    assert causes["malformed"] == 0
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    for place in range(8):
        assert value(target, name, position=str(place)) == sums[f"place {place}"]
    for outcome in ("tested", "accepted", "stale", "drafted"):
        assert value(gateway, "request_draft_tokens_total", outcome=outcome) == sums[outcome]
    for kind in ("delivered", "discarded"):
        assert value(gateway, "generation_tokens_total", kind=kind) == sums[kind]
    assert value(gateway, "prompt_tokens_total") == sums["prompt"]
    assert value(gateway, "requests_total") == 60
    assert value(house.read("draft"), "draft_tokens_total") >= sums["drafted"]
    show(f"metrics of 60 requests: {dict(sums)}, stale by cause {causes}")


async def _mixed(client: AsyncClient, i: int) -> Finished | None:
    """A request that ends in its own way; its final event, if there is one."""
    rng = random.Random(i)
    with contextlib.suppress(TandemError, TimeoutError):
        match i % 5:
            case 0:
                return await _finish(client, i)
            case 1:  # every token is a character, so one of these comes soon
                return await _finish(client, i, stop=[chr(c) for c in range(34, 60)])
            case 2:
                async with asyncio.timeout(rng.uniform(0.0, 0.1)):
                    await _finish(client, i)
            case 3:
                return await _finish(client, i, timeout=rng.uniform(0.001, 0.05))
            case 4:
                await _finish(client, i, model=f"no such model {i}")
    return None


def test_series_stay_bounded_and_counts_agree_after_mixed_requests(house: House) -> None:
    before, was = house.series(), house.read("gateway")

    async def ask() -> list[Finished | None]:
        async with AsyncClient(house.stack.gateway_address) as client:
            answers = list(await asyncio.gather(*(_mixed(client, i) for i in range(100))))
            await until(lambda: value(house.read("gateway"), "num_live_requests") == 0)
            return answers

    answers = asyncio.run(ask())
    assert house.series() == before
    gateway = house.read("gateway")

    def grown(name: str, **labels: str) -> float:
        return value(gateway, name, **labels) - value(was, name, **labels)

    # Some were cancelled before they arrived.
    assert 60 <= grown("requests_total") <= 100
    assert grown("requests_total", finish_reason="refused") >= 20
    assert grown("requests_total", finish_reason="stop_string") > 0
    finals = [f for f in answers if f is not None]
    # Those that were cut have figures, too, but nobody was told them.
    assert grown("generation_tokens_total") >= sum(
        f.usage.delivered + f.usage.discarded for f in finals
    )
    # Steps that were under way when a request was cut belong to nobody's final event.
    target = house.read("target")
    tested = value(gateway, "request_draft_tokens_total", outcome="tested")
    assert value(target, "spec_decode_num_draft_tokens_total") >= tested
    assert value(target, "num_requests_running") == 0
    assert value(target, "kv_cache_usage_ratio") == 0


def test_names_are_exactly_those_of_the_table(house: House) -> None:
    for service in OWNERS:
        text = house.read(service)
        assert exposed_names(text) == owned_names(service)
        assert {s.labels["pool"] for s in samples(text)} == {"blue"}
        assert "process_cpu_seconds_total" in text
