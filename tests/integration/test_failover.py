"""Targets and drafts that go away in mid-text: every text is the one an undisturbed run gives.

Two targets of the tiny model and two drafts, in real processes, share eight streams.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest

from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient
from tests.integration.collector import Collector, check_registered
from tests.integration.stacks import tiny_model
from tests.integration.streams import (
    NUM_STREAMS,
    Heard,
    assert_same,
    is_drafted,
    run,
    wait_until_all_ready,
)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
PATIENT = ["--silence-seconds=2", "--failover-seconds=60"]
PARTS = [f"tandem.{part}_seconds" for part in ("queue", "prefill", "steps", "wire", "gateway")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def stack(model: str, collector: Collector) -> Iterator[LocalStack]:
    with LocalStack(
        model=model,
        dtype="float32",
        num_targets=2,
        num_drafts=2,
        target_args=["--drain-seconds=0.6"],
        gateway_args=PATIENT,
        env=collector.env,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def expected(stack: LocalStack) -> list[Heard]:
    """What each stream gives undrafted and undisturbed."""
    return run(stack, speculate=False)


def test_one_of_two_targets_is_killed(
    stack: LocalStack, expected: list[Heard], show: Callable[[str], None]
) -> None:
    async def kill(stack: LocalStack) -> None:
        stack.targets[1].kill()

    heard = run(stack, kill)
    stack.start_target(1)
    assert_same(heard, expected)
    moved = [i for i, h in enumerate(heard) if "moved" in h.kinds()]
    tested = [h.finished.speculation.tested for h in heard if h.finished]
    show(f"failover: streams {moved} moved after a kill; draft tokens tested {tested}")
    assert len(moved) == NUM_STREAMS // 2  # they were shared evenly
    assert all(num == 0 or is_drafted(i) for i, num in enumerate(tested))
    assert sum(tested) > 0


def test_a_draft_is_killed_and_another_one_goes_on(
    stack: LocalStack, expected: list[Heard]
) -> None:
    wait_until_all_ready(stack)

    async def kill(stack: LocalStack) -> None:
        stack.kill_draft(0)

    heard = run(stack, kill)
    stack.start_draft(0)
    assert_same(heard, expected)
    for h in heard:
        assert not h.kinds() & {"draft_away", "moved"}


def test_a_target_is_told_to_stop(
    stack: LocalStack, expected: list[Heard], show: Callable[[str], None]
) -> None:
    """What it has not finished by half of its grace moves, and nothing new goes astray."""
    wait_until_all_ready(stack)

    async def terminate(stack: LocalStack) -> None:
        stack.targets[0].terminate()
        async with AsyncClient(stack.gateway_address) as client:
            for _ in range(10):
                answer = await client.generate([5, 6, 7], max_tokens=3, ignore_eos=True)
                assert len(answer.token_ids) == 3

    heard = run(stack, terminate)
    assert stack.targets[0].stop() == 0
    stack.start_target(0)
    assert_same(heard, expected)
    show(f"failover: {sum('moved' in h.kinds() for h in heard)} of 8 moved before a stop")


def test_a_target_hangs(stack: LocalStack, expected: list[Heard]) -> None:
    """Under SIGSTOP connections stay up, and nothing comes any more."""
    wait_until_all_ready(stack)
    pid = stack.targets[0].pid

    async def stop(stack: LocalStack) -> None:
        os.kill(pid, signal.SIGSTOP)

    try:
        heard = run(stack, stop)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert_same(heard, expected)
    assert sum("moved" in h.kinds() for h in heard) == NUM_STREAMS // 2


def test_all_targets_are_killed_and_come_back(stack: LocalStack, expected: list[Heard]) -> None:
    wait_until_all_ready(stack)

    async def kill(stack: LocalStack) -> None:
        for index, target in enumerate(stack.targets):
            target.kill()
            stack.start_target(index)

    heard = run(stack, kill)
    assert_same(heard, expected)
    assert all("moved" in h.kinds() for h in heard)


def test_what_was_traced_of_all_that(
    stack: LocalStack, collector: Collector, expected: list[Heard], show: Callable[[str], None]
) -> None:
    """Runs last: it ends the gateway, so that all of its spans are there."""
    del expected
    assert stack.gateway is not None
    assert stack.gateway.stop() == 0
    worst, num_moved = 0.0, 0
    for spans in collector.traces().values():
        own = [s for s in spans if s.service == "gateway"]
        (root,) = (s for s in own if "/" in s.span.name)
        for span in own:
            check_registered(span)
            assert span is root or span.span.parent_span_id == root.id
        sessions = sorted(
            (s for s in own if s.span.name == "target.session"),
            key=lambda s: s.span.start_time_unix_nano,
        )
        reasons = [s.get("tandem.session.reason") for s in sessions]
        assert reasons[0] == "first"
        assert set(reasons[1:]) <= {"target_lost", "target_draining"}
        for session in sessions[:-1]:
            assert {"tandem.target_lost", "tandem.moved"} & set(session.events)
        num_moved += len(sessions) - 1
        parts = [root.get(part) for part in PARTS]
        assert min(parts) > -1e-3
        worst = max(worst, abs(sum(parts) / root.seconds - 1))
    show(f"failover: {num_moved} moves traced; latency parts differ by {worst:.2%} at most")
    assert num_moved >= 2 * NUM_STREAMS
    assert worst <= 0.05


@pytest.mark.heavy
def test_the_only_target_comes_back(model: str) -> None:
    with LocalStack(model=model, dtype="float32", gateway_args=PATIENT) as alone:
        expected = run(alone, speculate=False)

        async def restart(alone: LocalStack) -> None:
            alone.targets[0].kill()
            alone.start_target()

        assert_same(run(alone, restart), expected)
