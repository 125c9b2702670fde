"""After a storm of requests cut short at random nothing is left of them anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest

from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient
from tests.integration.holdings import Holdings, holdings, settled, wait_until_idle
from tests.integration.stacks import tiny_model
from tests.integration.storm import (
    PHASES,
    SHARES,
    STALL_SECONDS,
    Known,
    Storm,
    drawn,
    ids_of,
    learn,
    unread,
)
from tests.scrape import free_port, scrape, value

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]
SPARE_FILES, SPARE_THREADS, SPARE_TASKS = 2, 4, 2
"""What a process may hold more than after its warm-up: a connection that is being closed, and
gRPC's own threads, which come and go."""


@dataclass(frozen=True)
class House:
    """Two targets, a draft and a gateway that have been used."""

    stack: LocalStack
    metrics_port: int
    known: list[Known]
    held: dict[str, Holdings]
    num_tasks: float

    def tasks(self) -> float:
        return value(scrape(self.metrics_port), "event_loop_tasks")


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    """Few rows a step and few sequences at once, so that prompts and queues take time."""
    model, port = tiny_model(tmp_path_factory.mktemp("tiny")), free_port()
    with LocalStack(
        model=model,
        draft=model,
        dtype="float64",
        num_targets=2,
        target_args=["--max-rows=4", "--max-running=6", "--num-kv-tokens=1024"],
        draft_args=["--num-kv-tokens=2048"],
        gateway_args=[f"--client-stall-seconds={STALL_SECONDS}", f"--metrics-port={port}"],
    ) as stack:
        rng = random.Random(0)

        async def warm_up() -> list[Known]:
            async with AsyncClient(stack.gateway_address) as client:
                known = await learn(client, rng)
                await Storm(stack.gateway_address, known, rng, client).blow(40)
                return known

        known = asyncio.run(warm_up())
        wait_until_idle(stack)
        time.sleep(1.0)  # connections that clients have closed are gone
        num_tasks = value(scrape(port), "event_loop_tasks")
        yield House(stack, port, known, holdings(stack), num_tasks)


@pytest.mark.parametrize("num_requests", [300, pytest.param(2000, marks=pytest.mark.heavy)])
def test_nothing_is_left(house: House, num_requests: int, show: Callable[[str], None]) -> None:
    began = time.monotonic()

    async def main() -> Storm:
        address = house.stack.gateway_address
        async with AsyncClient(address) as client:
            storm = Storm(address, house.known, random.Random(num_requests), client)
            await storm.blow(num_requests)
            for known in house.known[:5]:  # good ones are answered as before
                answer = await client.generate(known.prompt, known.options)
                assert known.answer is None or ids_of(answer) == known.answer
            return storm

    ended = asyncio.run(main()).ended
    seconds = time.monotonic() - began
    wait_until_idle(house.stack)

    def is_as_before() -> bool:
        now = holdings(house.stack)
        return house.tasks() <= house.num_tasks + SPARE_TASKS and all(
            now[name].num_files <= held.num_files + SPARE_FILES
            and now[name].num_threads <= held.num_threads + SPARE_THREADS
            for name, held in house.held.items()
        )

    settled(
        is_as_before, lambda: (house.tasks(), house.num_tasks, holdings(house.stack), house.held)
    )
    show(f"blocks: {num_requests} requests in {seconds:.0f} s, {dict(ended)}; nothing is left")
    least = num_requests // sum(SHARES.values())  # of one share
    assert all(ended[phase] >= SHARES[phase] * least for phase in PHASES)
    assert ended["deadline"] >= least  # a quarter has 11 ms or less
    assert ended["unread"] >= least


def test_clients_that_do_not_read_keep_nothing_of_ours(house: House) -> None:
    """While their connections stay open; gRPC keeps a task for each until its status is read."""
    num = 5

    async def main() -> None:
        address = house.stack.gateway_address
        async with contextlib.AsyncExitStack() as stalled:
            calls = [
                await stalled.enter_async_context(unread(address, *drawn(random.Random(i))))
                for i in range(num)
            ]
            await asyncio.to_thread(wait_until_idle, house.stack)
            most = house.num_tasks + num + SPARE_TASKS
            await asyncio.to_thread(settled, lambda: house.tasks() <= most, house.tasks)
            for call in calls:
                with contextlib.suppress(grpc.RpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert await call.code() is grpc.StatusCode.CANCELLED
                assert "has read nothing" in await call.details()

    asyncio.run(main())
