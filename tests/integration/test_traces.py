"""Every sampled request leaves one whole tree, whatever happens to it, over real processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.attributes import EVENTS
from common.errors import AbandonedError, InvalidRequestError, TandemError, TimedOutError
from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient, Client, Finished, Options, Started
from tests.integration.collector import (
    BlackHole,
    Collector,
    Received,
    check_registered,
    check_schemas,
)
from tests.integration.stacks import tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]
NUM_REQUESTS, NUM_AT_ONCE, KILL_AT = 50, 8, 20
KINDS = ("finished", "finished", "unary", "stop", "cancelled", "cancelled", "deadline", "bad")
PARTS = [f"tandem.{part}_seconds" for part in ("queue", "prefill", "steps", "wire", "gateway")]


@dataclass
class Outcome:
    """What the client saw of a request."""

    request_id: str
    kind: str
    num_prompt: int
    parent: str = ""  # the caller's trace context
    finished: Finished | None = None
    error: TandemError | None = None


@contextlib.contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Processes started inside write their logs to a file."""
    before = os.dup(2)
    with path.open("ab") as log:
        os.dup2(log.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def caller(number: int, sampled: bool = True) -> str:
    return f"00-{number:032x}-{number:016x}-{int(sampled):02x}"


async def ask(client: AsyncClient, number: int, kind: str, rng: random.Random) -> Outcome:
    """One request that ends as its kind says, or before that."""
    prompt = [rng.randrange(2, 60) for _ in range(rng.randrange(10, 60))]
    told = Outcome(f"{kind}-{number}", kind, len(prompt), caller(number) if number % 2 else "")
    options = Options(
        request_id=told.request_id,
        traceparent=told.parent,
        max_tokens=rng.randrange(60, 160),
        ignore_eos=True,
        seed=number,
        temperature=0.0 if number % 3 == 0 else 1.0,
        timeout=rng.uniform(0.1, 0.2) if kind == "deadline" else None,
        stop=["e", "t"] if kind == "stop" else (),
        top_p=2.0 if kind == "bad" else 1.0,
    )
    try:
        if kind == "unary":
            told.finished = (await client.generate(prompt, options)).finished
            return told
        patience = rng.random() * 0.2 if kind == "cancelled" else None
        await _listen(client, prompt, options, told, patience)
    except (TandemError, TimeoutError) as error:
        told.error = error if isinstance(error, TandemError) else AbandonedError("cancelled")
    return told


async def _listen(
    client: AsyncClient,
    prompt: list[int],
    options: Options,
    told: Outcome,
    patience: float | None,  # seconds after the first event: the gateway knows the request then
) -> None:
    async with (
        asyncio.timeout(None) as limit,
        contextlib.aclosing(client.stream(prompt, options)) as events,
    ):
        async for event in events:
            if isinstance(event, Finished):
                told.finished = event
            elif isinstance(event, Started) and patience is not None:
                limit.reschedule(asyncio.get_running_loop().time() + patience)


async def ask_all(stack: LocalStack, kill: bool) -> list[Outcome]:
    """Mixed requests, some at a time; the draft dies in the middle and comes back."""
    rng = random.Random(7)
    outcomes: list[Outcome] = []
    limit = asyncio.Semaphore(NUM_AT_ONCE)
    async with AsyncClient(stack.gateway_address) as client:

        async def one(number: int) -> None:
            async with limit:
                outcomes.append(await ask(client, number, KINDS[number % len(KINDS)], rng))
                if kill and len(outcomes) == KILL_AT:
                    await asyncio.to_thread(stack.kill_draft)
                    stack.start_draft()

        await asyncio.gather(*[one(n) for n in range(1, NUM_REQUESTS + 1)])
    return outcomes


@dataclass
class Run:
    """A stack's life: what its clients saw, what it traced, what it logged."""

    outcomes: list[Outcome]
    collector: Collector
    killed: bool  # whether the draft was, in the middle
    log: str


def run_stack(folder: Path, draft: str, kill: bool) -> Run:
    model = tiny_model(folder / "tiny")
    log = folder / "log"
    with Collector() as collector, stderr_to(log):
        stack = LocalStack(
            model=model, draft=model if draft == "model" else draft, env=collector.env
        )
        with stack:
            with Client(stack.gateway_address) as client:
                client.generate([5, 6, 7], max_tokens=2, traceparent=caller(999, sampled=False))
            outcomes = asyncio.run(ask_all(stack, kill))
    return Run(outcomes, collector, kill, log.read_text())


@pytest.fixture(
    scope="module", params=["model", pytest.param("ngram", marks=pytest.mark.heavy), "killed"]
)
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    draft = "model" if request.param == "killed" else request.param
    return run_stack(tmp_path_factory.mktemp("traces"), draft, request.param == "killed")


def roots(ran: Run) -> dict[str, Received]:
    found = [s for s in ran.collector.spans if s.service == "gateway" and "/" in s.span.name]
    by_id = {s.get("tandem.request.id"): s for s in found}
    assert len(by_id) == len(found) == NUM_REQUESTS
    return by_id


def test_every_request_is_one_connected_tree(ran: Run, show: Callable[[str], None]) -> None:
    traces, root_of = ran.collector.traces(), roots(ran)
    assert len(traces) == NUM_REQUESTS
    num_links = num_lost = 0
    for outcome in ran.outcomes:
        root = root_of[outcome.request_id]
        spans = traces[root.span.trace_id]
        by_id = {s.id: s for s in spans}
        assert len(by_id) == len(spans)
        if outcome.parent:
            _, trace_id, parent_id, _ = outcome.parent.split("-")
            assert root.span.trace_id.hex() == trace_id
            assert root.span.parent_span_id.hex() == parent_id
        else:
            assert root.span.parent_span_id == b""
        assert all(s is root or s.span.parent_span_id in by_id for s in spans)
        # A draft that is killed takes with it what it has not sent.
        count = Counter(s.span.name for s in spans)
        lost = ran.killed and count["draft.sequence"] < count["draft.session"]
        for span in spans:
            for link in span.span.links:
                resolved = link.trace_id == root.span.trace_id and link.span_id in by_id
                assert resolved or lost, (outcome, span.span.name)
                num_links, num_lost = num_links + resolved, num_lost + (not resolved)
        _check_shape(spans, lost)
    show(f"traces: {len(ran.collector.spans)} spans, {num_links} links, {num_lost} lost")
    assert num_links + num_lost > 100
    assert num_links > 0
    happened = [e for s in ran.collector.spans for e in s.events]
    assert ("tandem.draft_lost" in happened) is ran.killed


def _check_shape(spans: list[Received], lost: bool) -> None:
    """Whatever was begun is there: nothing was left without an end."""
    names = Counter(s.span.name for s in spans)
    assert names["target.sequence"] == names["target.session"] <= 1
    assert names["draft.sequence"] == names["draft.session"] or lost
    for sequence in (s for s in spans if s.span.name == "target.sequence"):
        below = [s for s in spans if s.span.parent_span_id == sequence.id]
        verified = [s for s in below if s.span.name == "target.verify"]
        assert len(verified) == sequence.get("tandem.num_steps")
        assert sequence.get("tandem.num_rounds_summed") == 0
        assert names["target.prefill"] == min(1, len(verified))
        for name in ("num_tested", "num_accepted", "num_stale"):
            total = sum(s.get(f"tandem.{name}") for s in verified)
            assert total == sequence.get(f"tandem.{name}")


def test_every_span_is_registered(ran: Run) -> None:
    events = {name for name, _ in EVENTS}
    for span in ran.collector.spans:
        check_registered(span)
        assert set(span.events) <= events
    check_schemas(ran.collector)


def test_spans_and_final_events_agree_to_the_token(ran: Run) -> None:
    traces, root_of = ran.collector.traces(), roots(ran)
    finished = [o for o in ran.outcomes if o.finished]
    assert {o.kind for o in finished} >= {"finished", "unary", "stop"}
    for outcome in finished:
        assert outcome.finished is not None
        figures, usage = outcome.finished.speculation, outcome.finished.usage
        root = root_of[outcome.request_id]
        told = {
            "num_steps": figures.steps,
            "num_drafted": figures.drafted,
            "num_tested": figures.tested,
            "num_accepted": figures.accepted,
            "num_stale": figures.stale,
            "num_undrafted_steps": figures.undrafted_steps,
            "num_delivered": usage.delivered,
            "num_discarded": usage.discarded,
        }
        assert {name: root.get(f"tandem.{name}") for name in told} == told
        assert root.get("gen_ai.usage.output_tokens") == usage.delivered + usage.discarded
        assert root.get("gen_ai.usage.input_tokens") == usage.prompt == outcome.num_prompt
        spans = traces[root.span.trace_id]
        drafted = [s.get("tandem.num_drafted") for s in spans if s.span.name == "draft.session"]
        assert sum(drafted) == figures.drafted
        # The target may have gone on for a moment after a stop string was found.
        end = usage.prompt + usage.delivered + usage.discarded
        steps = [s for s in spans if s.span.name == "target.verify"]
        steps = [s for s in steps if s.get("tandem.committed_len") < end]
        assert len(steps) == figures.steps
        for name in ("num_tested", "num_accepted", "num_stale"):
            assert sum(s.get(f"tandem.{name}") for s in steps) == told[name]
        ids = [i for s in steps for i in s.get("tandem.token_ids")]
        assert len(ids) == usage.delivered + usage.discarded


def test_the_parts_of_the_latency_sum_to_it(ran: Run, show: Callable[[str], None]) -> None:
    errors = []
    root_of = roots(ran)
    for outcome in (o for o in ran.outcomes if o.finished):
        assert outcome.finished is not None
        root, timing = root_of[outcome.request_id], outcome.finished.timing
        told = (
            timing.queue_seconds,
            timing.prefill_seconds,
            timing.steps_seconds,
            timing.wire_seconds,
            timing.gateway_seconds,
        )
        parts = [root.get(part) for part in PARTS]
        assert min(parts) > -1e-3, parts
        if root.seconds >= 0.1:
            errors.append(abs(sum(parts) / root.seconds - 1))
            errors.append(abs(sum(told) / timing.total_seconds - 1))
    assert len(errors) >= 10
    show(f"traces: latency parts differ from the whole by {max(errors):.2%} at most")
    assert max(errors) <= 0.05


def test_ends_show_as_status_and_event(ran: Run) -> None:
    root_of = roots(ran)
    seen: Counter[str] = Counter()
    for outcome in ran.outcomes:
        root = root_of[outcome.request_id]
        code, ok = root.get("rpc.grpc.status_code"), root.span.status.code != 2
        if outcome.finished:
            assert (code, ok) == (0, True)
            assert root.get("tandem.finish_reason") == outcome.finished.reason.name.lower()
            assert root.events == ["tandem.first_token"]
        elif isinstance(outcome.error, TimedOutError):
            assert (code, ok, root.events[-1]) == (4, False, "tandem.deadline")
        elif isinstance(outcome.error, InvalidRequestError):
            assert (code, ok, root.events) == (3, False, [])
        elif (code, ok) == (0, True):  # its end crossed with the client's leaving
            seen["crossed"] += 1
            continue
        else:
            assert (code, ok, root.events[-1]) == (1, False, "tandem.cancelled")
        seen[type(outcome.error).__name__] += 1
    assert seen["crossed"] <= 1
    assert seen["TimedOutError"] >= 3
    assert seen["AbandonedError"] >= 5
    assert seen["InvalidRequestError"] >= 5


def test_what_an_unsampled_request_leaves(ran: Run) -> None:
    assert (999).to_bytes(16, "big") not in ran.collector.traces()


def test_logs_are_clean(ran: Run) -> None:
    assert "Failed to detach context" not in ran.log
    assert "Traceback" not in ran.log


@pytest.mark.parametrize("collector", ["black hole", pytest.param("dead", marks=pytest.mark.heavy)])
def test_a_collector_that_fails_disturbs_nobody(
    collector: str, tmp_path: Path, show: Callable[[str], None]
) -> None:
    model = tiny_model(tmp_path / "tiny")
    with BlackHole() as hole:
        env = hole.env
        if collector == "dead":
            with Collector() as dead:
                env = dead.env  # nobody listens there from here on
        stack = LocalStack(model=model, draft="ngram", env=env)
        with stack, Client(stack.gateway_address) as client:
            for _ in range(5):
                answer = client.generate([5, 6, 7, 5, 6], max_tokens=50, ignore_eos=True)
                assert len(answer.token_ids) == 50
            services = [p for p in (stack.gateway, stack.draft, stack.target) if p is not None]
            assert len(services) == 3
            began = time.monotonic()
            for service in services:
                service.terminate()
            assert [service.stop() for service in services] == [0, 0, 0]
            seconds = time.monotonic() - began
    show(f"traces: {collector}: shutdown took {seconds:.1f} s")
    assert seconds < 10
