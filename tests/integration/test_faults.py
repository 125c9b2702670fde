"""Six silent minutes, services told to stop under twenty streams, and services that hang."""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from common.errors import UnavailableError
from gateway.cli.processes import LocalStack, ServiceProcess
from gateway.client import AsyncClient, Client, Delta, Options
from gateway.peer import HEARTBEAT_SECONDS, MAX_BACKOFF_SECONDS
from gateway.types import PeerKind, PeerState
from tests.integration.holdings import processes, sockets, wait_until_idle
from tests.integration.stacks import tiny_model
from tests.integration.streams import Heard, assert_same, run, wait_until_all_ready

pytestmark = [pytest.mark.processes, pytest.mark.heavy, pytest.mark.timeout(600)]
NUM_STREAMS = 20
SILENT_SECONDS = 360.0
SILENCE_SECONDS, FAILOVER_SECONDS = 2.0, 3.0
NOTICED_SECONDS = SILENCE_SECONDS + min(HEARTBEAT_SECONDS, SILENCE_SECONDS / 4)
SLACK_SECONDS = 1.5  # for a machine that has other things to do
SHORT = Options(max_tokens=3, ignore_eos=True, temperature=0.0)
BOUNDS = [
    f"--silence-seconds={SILENCE_SECONDS:g}",
    f"--failover-seconds={FAILOVER_SECONDS:g}",
]


def self_drafting(model: str) -> dict[str, Any]:
    """A stack whose cache holds all streams at once: none waits until others have ended."""
    cache = ["--num-kv-tokens=8192"]
    own = {"model": model, "draft": model, "dtype": "float32"}
    return own | {"target_args": cache, "draft_args": cache}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def alone(model: str) -> Iterator[LocalStack]:
    """One target, and a draft that has blocks too."""
    with LocalStack(**self_drafting(model), gateway_args=BOUNDS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(alone: LocalStack) -> list[Heard]:
    """What each stream gives undrafted and undisturbed."""
    return run(alone, speculate=False, num_streams=NUM_STREAMS)


async def _until(client: AsyncClient, kind: PeerKind, holds: Callable[[PeerState], bool]) -> float:
    """How long it takes until the only peer of a kind is in such a state, in seconds."""
    began = time.monotonic()
    while True:
        (peer,) = (p for p in (await client.status()).peers if p.kind is kind)
        if holds(peer.state):
            return time.monotonic() - began
        assert time.monotonic() - began < 60, peer
        await asyncio.sleep(0.02)


def _stopped(process: ServiceProcess) -> Callable[[], None]:
    """Hang a process under SIGSTOP; returns what lets it go on."""
    os.kill(process.pid, signal.SIGSTOP)
    return lambda: os.kill(process.pid, signal.SIGCONT)


def test_six_silent_minutes(alone: LocalStack, show: Callable[[str], None]) -> None:
    """No word from any client; then the first answer is at once, over the same connections."""
    prompt = [5, 6, 7, 8]
    with Client(alone.gateway_address) as client:
        before = client.generate(prompt, SHORT, max_tokens=50)
        pids = {name: process.pid for name, process in processes(alone).items()}
        pids["client"] = os.getpid()
        held = {name: sockets(pid) for name, pid in pids.items()}
        time.sleep(SILENT_SECONDS)
        assert {name: sockets(pid) for name, pid in pids.items()} == held
        began = time.monotonic()
        stream = client.stream(prompt, SHORT, max_tokens=50)
        first = next(event for event in stream if isinstance(event, Delta))
        seconds = time.monotonic() - began
        ids = list(first.token_ids)
        ids += [i for event in stream if isinstance(event, Delta) for i in event.token_ids]
        assert tuple(ids) == before.token_ids
        assert {name: sockets(pid) for name, pid in pids.items()} == held
        status = client.status()
    show(
        f"faults: first token {seconds * 1e3:.0f} ms after {SILENT_SECONDS:.0f} silent s,"
        f" same {sum(map(len, held.values()))} sockets"
    )
    assert seconds < 1.0
    assert all(peer.state is PeerState.READY for peer in status.peers)


def test_the_gateway_is_told_to_stop(
    model: str, expected: list[Heard], show: Callable[[str], None]
) -> None:
    """What runs is finished; what comes, and knows no other gateway, finds none."""
    refusals: list[UnavailableError] = []
    with LocalStack(**self_drafting(model)) as stack:
        assert stack.gateway is not None
        gateway = stack.gateway

        async def terminate(stack: LocalStack) -> None:
            gateway.terminate()
            async with AsyncClient(stack.gateway_address) as client, asyncio.timeout(5):
                while len(refusals) < 10:
                    try:
                        await client.generate([5, 6, 7], SHORT)
                    except UnavailableError as error:
                        refusals.append(error)

        began = time.monotonic()
        heard = run(stack, terminate, num_streams=NUM_STREAMS)
        assert gateway.stop() == 0
        seconds = time.monotonic() - began
        codes = [process.stop() for process in (*stack.drafts, *stack.targets)]
    assert_same(heard, expected)
    show(f"faults: {NUM_STREAMS} streams finished, the gateway stopped after {seconds:.1f} s")
    assert all(str(error).startswith("no gateway at ") for error in refusals)
    assert codes == [0, 0]


def test_a_target_is_told_to_stop(
    model: str, expected: list[Heard], show: Callable[[str], None]
) -> None:
    """What it has is finished, there or elsewhere; what comes goes to the other one."""
    with LocalStack(**self_drafting(model), num_targets=2) as stack:
        num_answers = 0

        async def terminate(stack: LocalStack) -> None:
            nonlocal num_answers
            stack.targets[0].terminate()
            async with AsyncClient(stack.gateway_address) as client:
                while stack.targets[0].exit_code is None:
                    answer = await client.generate([5, 6, 7], SHORT)
                    assert len(answer.token_ids) == 3
                    num_answers += 1
                status = await client.status()
            assert [p.state is PeerState.READY for p in status.peers] == [False, True, True]

        began = time.monotonic()
        heard = run(stack, terminate, num_streams=NUM_STREAMS)
        assert stack.targets[0].stop() == 0
        seconds = time.monotonic() - began
    assert_same(heard, expected)
    num_moved = sum("moved" in h.kinds() for h in heard)
    show(
        f"faults: a target stopped after {seconds:.1f} s, {num_moved} of {NUM_STREAMS} streams"
        f" moved, {num_answers} requests answered meanwhile"
    )
    assert num_answers > 0
    assert seconds < 30  # its grace


def test_the_draft_hangs(
    alone: LocalStack, expected: list[Heard], show: Callable[[str], None]
) -> None:
    """It costs speed only, is seen to be away within bounds, and comes back."""
    assert alone.draft is not None
    draft, lost = alone.draft, [0.0]

    async def hang(alone: LocalStack) -> None:
        go_on.append(_stopped(draft))
        async with AsyncClient(alone.gateway_address) as client:
            lost[0] = await _until(client, PeerKind.DRAFT, lambda s: s is not PeerState.READY)

    go_on: list[Callable[[], None]] = []
    wait_until_all_ready(alone)
    before = run(alone, num_streams=NUM_STREAMS)
    try:
        hung = run(alone, hang, num_streams=NUM_STREAMS)
        without = run(alone, num_streams=NUM_STREAMS)
    finally:
        for resume in go_on:
            resume()
    back = asyncio.run(_until_ready(alone, PeerKind.DRAFT))
    after = run(alone, num_streams=NUM_STREAMS)
    for heard in (before, hung, without, after):
        assert_same(heard, expected)
    wait_until_idle(alone)
    seconds = [_seconds(heard) for heard in (before, without, after)]
    show(
        f"faults: a hung draft was lost after {lost[0]:.1f} s and back after {back:.1f} s;"
        f" a stream took {', '.join(f'{s:.2f}' for s in seconds)} s before, without and after"
    )
    assert lost[0] < NOTICED_SECONDS + SLACK_SECONDS
    assert back < MAX_BACKOFF_SECONDS + SLACK_SECONDS
    assert [_tested(h) > 0 for h in (before, without, after)] == [True, False, True]
    assert seconds[2] < 2 * seconds[0]


def test_the_only_target_hangs(
    alone: LocalStack, expected: list[Heard], show: Callable[[str], None]
) -> None:
    """Clients are told within bounds, and nothing is left of it once it goes on."""
    assert alone.target is not None
    target, hung_at = alone.target, 0.0

    async def hang(alone: LocalStack) -> None:
        nonlocal hung_at
        hung_at = time.monotonic()
        go_on.append(_stopped(target))

    go_on: list[Callable[[], None]] = []
    wait_until_all_ready(alone)
    try:
        heard = run(alone, hang, num_streams=NUM_STREAMS)
        with Client(alone.gateway_address) as client, pytest.raises(UnavailableError) as refused:
            client.generate([5, 6, 7], SHORT)
    finally:
        for resume in go_on:
            resume()
    told = max(h.ended_at for h in heard) - hung_at
    back = asyncio.run(_until_ready(alone, PeerKind.TARGET))
    for h, whole in zip(heard, expected, strict=True):
        assert isinstance(h.error, UnavailableError)
        assert h.error.retry_after_seconds
        assert h.token_ids == whole.token_ids[: len(h.token_ids)]
    assert_same(run(alone, num_streams=NUM_STREAMS), expected)
    wait_until_idle(alone)
    show(f"faults: clients of a hung target were told after {told:.1f} s, back after {back:.1f} s")
    assert refused.value.retry_after_seconds
    assert told < NOTICED_SECONDS + FAILOVER_SECONDS + SLACK_SECONDS
    assert back < MAX_BACKOFF_SECONDS + SLACK_SECONDS


async def _until_ready(stack: LocalStack, kind: PeerKind) -> float:
    async with AsyncClient(stack.gateway_address) as client:
        return await _until(client, kind, lambda state: state is PeerState.READY)


def _seconds(heard: list[Heard]) -> float:
    """Of a stream, on average, as the gateway tells it."""
    return statistics.mean(h.finished.timing.total_seconds for h in heard if h.finished)


def _tested(heard: list[Heard]) -> int:
    return sum(h.finished.speculation.tested for h in heard if h.finished)
