"""Targets and drafts that go away in mid-text: every text is the one an undisturbed run gives.

Two targets of the tiny model, in real processes, share the load of eight streams. Under greedy
and `COUPLED` identity is to the token: float32 on one machine, and steps whose rows may share
other batches, whose near-ties (none has been seen) would show as a failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from common.errors import UnavailableError
from common.types import FinishReason
from gateway.cli.processes import LocalStack, ServiceProcess
from gateway.client import AsyncClient, Client, Delta, Finished, Generation, Options
from gateway.types import PeerState
from tests.integration.stacks import tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
NUM_STREAMS, NUM_TOKENS = 8, 200
FAST = ["--silence-seconds=2", "--failover-seconds=30"]
PROMPT_LEN = 24
TEMPERATURES = [pytest.param(0.0, id="greedy"), pytest.param(1.0, id="coupled")]
Disturb = Callable[[LocalStack], Awaitable[None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def stack(model: str) -> Iterator[LocalStack]:
    with LocalStack(
        model=model, dtype="float32", num_targets=2, num_drafts=2, gateway_args=FAST
    ) as running:
        yield running


def prompt(i: int) -> list[int]:
    """One that repeats itself, so that an n-gram draft finds something."""
    return [2 + (7 * i + j) % 40 for j in range(PROMPT_LEN // 2)] * 2


@dataclass
class Heard:
    """What a client got, piece by piece."""

    token_ids: list[int]
    text: str
    finished: Finished | None = None


@dataclass
class Progressing:
    """Streams that run, and how many of them have had some tokens."""

    heard: list[Heard]

    def begun(self) -> bool:
        return all(len(h.token_ids) >= 5 for h in self.heard)


async def listen(client: AsyncClient, i: int, options: Options, heard: Heard) -> None:
    async for event in client.stream(prompt(i), replace(options, seed=100 + i)):
        if isinstance(event, Delta):
            heard.token_ids += event.token_ids
            heard.text += event.text
        elif isinstance(event, Finished):
            heard.finished = event


def run(stack: LocalStack, options: Options, disturb: Disturb | None = None) -> list[Heard]:
    """Eight streams at once; `disturb` is called once all of them have had some tokens."""
    all_heard = [Heard([], "") for _ in range(NUM_STREAMS)]

    async def main() -> None:
        async with AsyncClient(stack.gateway_address) as client:
            streams = [
                asyncio.create_task(listen(client, i, options, heard))
                for i, heard in enumerate(all_heard)
            ]
            if disturb is not None:
                await until(Progressing(all_heard).begun)
                assert not any(heard.finished for heard in all_heard)
                await disturb(stack)
            await asyncio.gather(*streams)

    asyncio.run(main())
    return all_heard


async def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():  # noqa: ASYNC110  # what is awaited is in other processes
            await asyncio.sleep(0.002)


def wait_until_all_ready(stack: LocalStack) -> None:
    deadline = time.monotonic() + 60
    with Client(stack.gateway_address) as client:
        while any(peer.state is not PeerState.READY for peer in client.status().peers):
            assert time.monotonic() < deadline, client.status()
            time.sleep(0.05)


def options(temperature: float, drafted: bool = True) -> Options:
    return Options(
        max_tokens=NUM_TOKENS, ignore_eos=True, temperature=temperature, speculate=drafted
    )


_undisturbed: dict[float, list[Heard]] = {}


def undisturbed(stack: LocalStack, temperature: float) -> list[Heard]:
    if temperature not in _undisturbed:
        _undisturbed[temperature] = run(stack, options(temperature, drafted=False))
    return _undisturbed[temperature]


def assert_same(heard: list[Heard], expected: list[Heard]) -> None:
    assert [h.token_ids for h in heard] == [h.token_ids for h in expected]
    assert [h.text for h in heard] == [h.text for h in expected]
    for h in heard:
        assert h.finished is not None
        assert h.finished.reason is FinishReason.LENGTH
        assert h.finished.usage.delivered == len(h.token_ids) == NUM_TOKENS
        assert h.finished.usage.discarded == 0


def num_moved(stack: LocalStack, heard: list[Heard]) -> int:
    """How many of the last requests have changed their target, by what the gateway explains."""
    assert all(h.finished and h.finished.explanation for h in heard)
    return sum(
        any(f.kind == "moved" for f in h.finished.explanation.findings)
        for h in heard
        if h.finished and h.finished.explanation
    )


@pytest.mark.parametrize("drafted", [True, False], ids=["drafted", "undrafted"])
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_target_is_killed(
    stack: LocalStack, temperature: float, drafted: bool, show: Callable[[str], None]
) -> None:
    wait_until_all_ready(stack)
    expected = undisturbed(stack, temperature)

    async def kill(stack: LocalStack) -> None:
        stack.targets[1].kill()

    asked = replace(options(temperature, drafted), explain=True)
    heard = run(stack, asked, kill)
    stack.start_target(1)
    assert_same(heard, expected)
    moved = num_moved(stack, heard)
    tested = sum(h.finished.speculation.tested for h in heard if h.finished)
    show(f"failover, T={temperature}, drafted={drafted}: {moved} of 8 moved, tested {tested}")
    assert moved == NUM_STREAMS // 2  # they were shared evenly
    assert (tested > 0) is drafted


def test_a_target_is_stopped_by_a_signal(stack: LocalStack) -> None:
    """SIGSTOP: connections stay up and nothing comes any more."""
    wait_until_all_ready(stack)
    expected = undisturbed(stack, 1.0)

    async def stop(stack: LocalStack) -> None:
        os.kill(stack.targets[0].pid, signal.SIGSTOP)

    began = time.monotonic()
    try:
        heard = run(stack, replace(options(1.0), explain=True), stop)
    finally:
        os.kill(stack.targets[0].pid, signal.SIGCONT)
    assert_same(heard, expected)
    assert num_moved(stack, heard) == NUM_STREAMS // 2
    assert time.monotonic() - began > 2.0


def test_a_target_is_told_to_stop(stack: LocalStack) -> None:
    wait_until_all_ready(stack)
    expected = undisturbed(stack, 1.0)

    async def terminate(stack: LocalStack) -> None:
        stack.targets[0].terminate()

    heard = run(stack, options(1.0), terminate)
    assert stack.targets[0].stop() == 0
    stack.start_target(0)
    assert_same(heard, expected)


def test_a_draft_is_killed_and_another_one_goes_on(stack: LocalStack) -> None:
    wait_until_all_ready(stack)
    expected = undisturbed(stack, 0.0)

    async def kill(stack: LocalStack) -> None:
        stack.drafts[0].kill()

    heard = run(stack, replace(options(0.0), explain=True), kill)
    assert_same(heard, expected)
    stack.start_draft(0)
    for h in heard:
        assert h.finished is not None
        assert h.finished.explanation is not None
        kinds = {f.kind for f in h.finished.explanation.findings}
        assert not kinds & {"draft_away", "moved"}


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_only_target_comes_back(model: str, temperature: float) -> None:
    with LocalStack(model=model, dtype="float32", gateway_args=FAST) as alone:
        expected = run(alone, options(temperature, drafted=False))

        async def restart(alone: LocalStack) -> None:
            alone.targets[0].kill()
            alone.start_target()

        assert_same(run(alone, options(temperature), restart), expected)
