"""After 500 requests cancelled at random moments every block of both services is free."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from common.errors import AbandonedError
from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient, Delta, Options, Progress, Started
from tests.integration.stacks import tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
NUM_REQUESTS, NUM_AT_ONCE = 500, 24


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalStack]:
    """Few rows a step and few sequences at once, so that prompts and queues take time."""
    model = tiny_model(tmp_path_factory.mktemp("tiny"))
    target_args = ["--max-rows=4", "--max-running=6", "--num-kv-tokens=1024"]
    with LocalStack(
        model=model,
        draft=model,
        target_args=target_args,
        draft_args=["--num-kv-tokens=2048"],
    ) as running:
        yield running


async def _one(client: AsyncClient, rng: random.Random, phases: Counter[str]) -> None:
    """A request that is cancelled in the phase it is in at a random moment."""
    prompt = [rng.randrange(2, 60) for _ in range(rng.randrange(100, 190))]
    phase = "queue"
    wanted = rng.choice(["queue"] * 2 + ["prefill"] * 3 + ["decode"])
    options = Options(max_tokens=60, ignore_eos=True, temperature=1.0, seed=rng.randrange(2**64))
    stream = client.stream(prompt, options)
    try:
        async for event in stream:
            if isinstance(event, Progress) and event.num_ahead == 0:
                phase = "prefill"
            elif isinstance(event, Delta):
                phase = "decode"
            if phase == wanted and not isinstance(event, Started):
                await asyncio.sleep(rng.random() * 0.01)
                break
            if isinstance(event, Started) and wanted == "queue" and rng.random() < 0.5:
                break
            if phase == "decode":
                break  # its phase has passed
    except AbandonedError:
        pass
    finally:
        await stream.aclose()
        phases[phase] += 1


def test_blocks_come_back(stack: LocalStack, show: Callable[[str], None]) -> None:
    rng, phases = random.Random(1), Counter[str]()

    async def main() -> None:
        async with AsyncClient(stack.gateway_address) as client:
            limit = asyncio.Semaphore(NUM_AT_ONCE)

            async def limited() -> None:
                async with limit:
                    await _one(client, rng, phases)

            await asyncio.gather(*[limited() for _ in range(NUM_REQUESTS)])
            answer = await client.generate([5, 6, 7], max_tokens=4, ignore_eos=True)
            assert len(answer.token_ids) == 4
            deadline = time.monotonic() + 10
            while True:
                status = await client.status()
                engines = [p.engine for p in status.peers if p.engine]
                idle = [e.num_free_blocks == e.num_blocks > 0 for e in engines]
                if len(idle) == 2 and all(idle) and status.num_live_requests == 0:
                    return
                assert time.monotonic() < deadline, status
                await asyncio.sleep(0.1)

    asyncio.run(main())
    show(f"blocks: {NUM_REQUESTS} requests cancelled, {dict(phases)}, all blocks free")
    assert all(phases[phase] >= NUM_REQUESTS * 0.2 for phase in ("queue", "prefill", "decode"))
