"""Several targets and drafts: who is asked, and who goes on when one is gone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest

from common.errors import (
    CapacityError,
    InvalidRequestError,
    NotFoundError,
    SequenceError,
    TimedOutError,
    UnavailableError,
    sequence_error,
)
from common.types import (
    ChainId,
    Draining,
    EngineStatus,
    OpenSequence,
    Refusal,
    SamplingParams,
    Verdict,
    VerdictTiming,
)
from gateway.fleet import Fleet
from gateway.spans import GatewaySpans
from gateway.types import Delta, GenerationRequest
from tests.gateway.fakes import (
    TARGET_MODEL,
    TOKENIZER,
    FakeDraft,
    FakeTarget,
    World,
    ending,
    in_world,
    states,
    until,
    verdicts,
)
from tests.scrape import text_of, value
from tests.tracing import Recorder, attributes, events

STOPS = Verdict(0, 0, 0, 0, (), error=sequence_error(UnavailableError("is about to stop")))
FULL = Verdict(0, 0, 0, 0, (), error=SequenceError(8, "NO_CAPACITY", "the queue is full"))


def between(test: Callable[[World], Awaitable[None]], num: int = 2, **settings: Any) -> None:
    """Run a test in a gateway with some targets that answer the same."""
    others = [FakeTarget() for _ in range(num - 1)]
    in_world(test, other_targets=others, **settings)


def reopens(w: World, reason: str) -> float:
    return value(text_of(w.relay.metrics.metrics), "sequence_reopens_total", reason=reason)


async def opened_at(*targets: FakeTarget) -> tuple[FakeTarget, FakeTarget]:
    """The target that got the one request, and another one."""
    await until(lambda: any(t.opens for t in targets), "the open")
    first = next(t for t in targets if t.opens)
    return first, next(t for t in targets if t is not first)


@contextlib.asynccontextmanager
async def streaming(w: World, prompt: str = "ab", **options: Any) -> AsyncIterator[list[str]]:
    """A stream in the background, its pieces as they come; it must end well."""
    pieces: list[str] = []

    async def listen() -> None:
        async for event in w.client.stream(prompt, **options):
            pieces.extend([event.text] if isinstance(event, Delta) else [])

    task = asyncio.create_task(listen())
    try:
        yield pieces
        async with asyncio.timeout(10):
            await task
    finally:
        task.cancel()


# -- a target is lost ----------------------------------------------------------------------


def test_a_text_goes_on_at_another_target() -> None:
    async def test(w: World) -> None:
        options = {"seed": 5, "max_tokens": 40, "timeout": 60.0, "lookahead": 3}
        async with streaming(w, "ab", **options) as pieces:
            first, second = await opened_at(*w.targets)
            await until(lambda: w.draft.opens)
            at_draft = w.draft.opens[0]
            first.say(*verdicts(first.opens[0], ["hel", "lo"]))
            await until(lambda: "".join(pieces) == "hello")
            await first.stop()
            await until(lambda: second.opens, "the move")
            again, before = second.opens[0], first.opens[0]
            assert again.token_ids == TOKENIZER.encode("abhello")
            assert again.num_prompt == 2
            assert again.resumed
            assert not before.resumed
            assert again.sampling == before.sampling
            assert again.lookahead == before.lookahead == 3
            assert again.sequence_id > before.sequence_id
            assert again.timeout_seconds is not None
            assert before.timeout_seconds is not None
            assert 0 < again.timeout_seconds < before.timeout_seconds
            # The draft begins anew, so that no piece of a chain is missing at the target.
            await until(lambda: len(w.draft.opens) == 2 and w.draft.closes)
            assert w.draft.closes == [at_draft.sequence_id]
            redrafted = w.draft.opens[1]
            assert redrafted.token_ids == again.token_ids
            w.draft.propose(at_draft.sequence_id, serial=7, start=9, text="old")
            w.draft.propose(redrafted.sequence_id, serial=0, start=7, text="new")
            await until(lambda: second.proposals)
            assert [p.chain_id for p in second.proposals] == [ChainId(redrafted.sequence_id, 0)]
            assert second.proposals[0].sequence_id == again.sequence_id
            second.say(*verdicts(again, [" wor", ending("ld")]))
        assert "".join(pieces) == "hello world"
        assert reopens(w, "target_lost") == 1
        assert reopens(w, "draft_returned") == 0

    between(test, drafted=True)


def test_verdicts_of_a_target_that_was_left_are_ignored() -> None:
    async def test(w: World) -> None:
        async with streaming(w) as pieces:
            first, second = await opened_at(*w.targets)
            first.say(*verdicts(first.opens[0], ["he"]))
            await until(lambda: pieces[-1:] == ["he"])
            first.say(Draining(2.0))
            began = time.monotonic()
            await until(lambda: second.opens, "the move")
            assert 0.9 < time.monotonic() - began < 2.0  # by half of its grace
            await until(lambda: first.closes == [first.opens[0].sequence_id])
            first.say(*verdicts(first.opens[0], ["XX"], committed_len=4))
            second.say(*verdicts(second.opens[0], [ending("y!")]))
        assert "".join(pieces) == "hey!"
        assert reopens(w, "target_draining") == 1

    between(test)


def test_the_same_target_may_come_back() -> None:
    async def test(w: World) -> None:
        async with streaming(w) as pieces:
            await until(lambda: w.target.opens)
            w.target.say(*verdicts(w.target.opens[0], ["he"]))
            await until(lambda: pieces[-1:] == ["he"])
            await w.target.stop()
            await until(lambda: states(w.relay) == ["CONNECTING"])
            with pytest.raises(UnavailableError) as caught:
                await w.stream()  # what is new does not wait
            assert caught.value.retry_after_seconds == 1.0
            w.target.script = [ending("y!")]
            await w.target.start()
        assert "".join(pieces) == "hey!"

    in_world(test)


def test_waiting_for_a_target_is_bounded() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        await w.target.stop()
        with pytest.raises(UnavailableError, match=r"was lost: .*come within 0\.2 s") as caught:
            await task
        assert caught.value.retry_after_seconds == 1.0
        assert w.relay.num_live() == 0

    in_world(test, failover_seconds=0.2)


@pytest.mark.parametrize("why", ["Stream removed (Socket closed)", "failed to connect to all"])
def test_a_target_that_is_lost_is_not_taken_for_the_gateway(why: str) -> None:
    """The client reads what the gateway quotes, and when to try again."""

    async def test(w: World) -> None:
        asking = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        await w.target.stop()
        with pytest.raises(UnavailableError, match="none that answers the same") as caught:
            await asking
        assert caught.value.retry_after_seconds
        assert why in str(caught.value)

    with mock.patch.object(Fleet, "why_none", return_value=why):
        in_world(test, failover_seconds=0.2)


def test_deadline_and_cancellation_hold_while_a_request_waits() -> None:
    async def test(w: World) -> None:
        late = asyncio.create_task(w.stream(timeout=0.5))
        gone = asyncio.create_task(w.stream())
        await until(lambda: len(w.target.opens) == 2)
        await w.target.stop()
        await until(lambda: states(w.relay) == ["CONNECTING"])
        assert w.relay.num_live() == 2
        gone.cancel()
        await until(lambda: w.relay.num_live() == 1)
        with pytest.raises(TimedOutError):
            await late
        await until(lambda: w.relay.num_live() == 0)
        await w.target.start()
        await until(lambda: states(w.relay) == ["READY"])
        await asyncio.sleep(0.05)
        assert len(w.target.opens) == 2  # nobody waits any more

    in_world(test)


def _has_opens(target: FakeTarget, num: int) -> bool:
    return len(target.opens) == num


def test_a_request_that_loses_target_after_target_is_ended() -> None:
    """It may be what kills them."""

    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        for num in range(1, 5):
            await until(partial(_has_opens, w.target, num), "the open")
            await w.target.stop()
            await until(lambda: states(w.relay) == ["CONNECTING"])
            await w.target.start()
        with pytest.raises(UnavailableError, match="the 4th without a token"):
            await task

    in_world(test)


def test_a_target_with_other_weights_takes_no_part() -> None:
    """The name stands for what was there first, as long as that is there or waited for."""

    async def test(w: World) -> None:
        place = states(w.relay).index("MISMATCHED")
        other, first = w.targets[place], w.targets[1 - place]
        told = w.relay.status()[place].detail
        assert f"its weights_fingerprint is '{other.model.weights_fingerprint}', not" in told
        assert first.address in told
        task = asyncio.create_task(w.stream())
        await until(lambda: first.opens)
        await first.stop()
        with pytest.raises(UnavailableError, match=r"within 0\.5 s .*its weights_fingerprint is"):
            await task
        assert other.opens == []
        # Nobody waits any more and nothing else is there: it may have the name.
        await until(lambda: states(w.relay)[place] == "READY")
        other.script = [ending("new")]
        assert w.text(await w.stream()) == "new"

    changed = FakeTarget(replace(TARGET_MODEL, weights_fingerprint="w2"))
    in_world(test, other_targets=[changed], failover_seconds=0.5)


@pytest.mark.parametrize(("name", "state"), [("other", "READY"), ("tiny", "MISMATCHED")])
def test_a_running_text_does_not_go_on_with_other_weights_that_came_in_its_place(
    name: str, state: str
) -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream())
        await until(lambda: w.target.opens)
        await w.target.stop()
        w.target.model = replace(TARGET_MODEL, name=name, weights_fingerprint="w2")
        await w.target.start()
        await until(lambda: states(w.relay) == [state])
        with pytest.raises(UnavailableError, match="its weights_fingerprint is 'w2', not 'w1'"):
            await task
        assert len(w.target.opens) == 1
        await until(lambda: states(w.relay) == ["READY"])

    in_world(test, failover_seconds=1.0)


# -- a target will not serve a sequence ----------------------------------------------------


def test_a_target_that_stops_refuses_and_another_one_serves() -> None:
    async def test(w: World) -> None:
        for target in w.targets:
            target.script = [STOPS]
        w.targets[1].script = [ending("fine")]
        w.targets[0].script = [STOPS]
        for _ in range(4):
            assert w.text(await w.stream()) == "fine"
        assert reopens(w, "target_lost") == len(w.targets[0].opens) > 0
        # A sequence is not offered twice to a stream that has refused it.
        w.targets[1].script = [STOPS]
        opens = len(w.targets[0].opens) + len(w.targets[1].opens)
        with pytest.raises(UnavailableError, match="is about to stop; none that answers"):
            await w.stream()
        assert len(w.targets[0].opens) + len(w.targets[1].opens) == opens + 2

    between(test, failover_seconds=0.3)


def test_a_full_target_is_no_reason_to_fail_while_another_one_has_room() -> None:
    async def test(w: World) -> None:
        w.targets[0].script = [FULL]
        w.targets[1].script = [ending("fine")]
        for _ in range(4):
            assert w.text(await w.stream()) == "fine"
        assert reopens(w, "target_full") == len(w.targets[0].opens) > 0
        w.targets[1].script = [FULL]
        with pytest.raises(CapacityError, match="the queue is full"):
            await w.stream()

    between(test)


def test_a_draining_target_gets_nothing_new_and_keeps_what_has_nowhere_to_go() -> None:
    async def test(w: World) -> None:
        async with streaming(w) as pieces:
            first, second = await opened_at(*w.targets)
            await second.stop()
            await until(lambda: "CONNECTING" in states(w.relay))
            first.say(Draining(0.1))
            await until(lambda: "DRAINING" in states(w.relay))
            await asyncio.sleep(0.1)  # half of its grace is over
            first.say(*verdicts(first.opens[0], ["he"]))
            await until(lambda: pieces[-1:] == ["he"])
            second.script = [ending("y!")]
            await second.start()  # late, but now there is a place
        assert "".join(pieces) == "hey!"
        assert second.opens[0].token_ids == TOKENIZER.encode("abhe")
        second.script = [ending("new")]
        assert w.text(await w.stream()) == "new"
        assert len(first.opens) == 1

    between(test)


# -- who is asked --------------------------------------------------------------------------


def test_requests_are_spread_and_those_of_one_beginning_stay_together() -> None:
    async def test(w: World) -> None:
        tasks = [asyncio.create_task(w.stream(f"{i}")) for i in range(6)]
        await until(lambda: sum(len(t.opens) for t in w.targets) == 6)
        assert [len(t.opens) for t in w.targets] == [2, 2, 2]
        for target in w.targets:
            for opened in list(target.opens):
                target.say(*verdicts(opened, [ending("x")]))
            target.script = [ending("x")]
        await asyncio.gather(*tasks)
        for _ in range(6):
            await w.stream("x" * 150)
        assert sorted(len(t.opens) for t in w.targets) == [2, 2, 8]

    between(test, num=3)


def test_the_load_that_others_put_on_a_target_counts() -> None:
    async def test(w: World) -> None:
        w.targets[0].say(EngineStatus(num_running=3, num_waiting=1))
        await until(lambda: any(s.engine for s in w.relay.status()))
        tasks = [asyncio.create_task(w.stream(f"{i}")) for i in range(4)]
        await until(lambda: len(w.targets[1].opens) == 4)
        assert w.targets[0].opens == []
        for opened in w.targets[1].opens:
            w.targets[1].say(*verdicts(opened, [ending("x")]))
        await asyncio.gather(*tasks)

    between(test)


def test_several_models_are_told_apart_by_name() -> None:
    async def test(w: World) -> None:
        for target, text in zip(w.targets, ("one", "two"), strict=True):
            target.script = [ending(text)]
        assert [m.name for m in await w.client.models()] == ["tiny", "big"]
        assert w.text(await w.stream(model="tiny")) == "one"
        assert w.text(await w.stream(model="big")) == "two"
        with pytest.raises(InvalidRequestError, match='must be one of "big", "tiny"') as caught:
            await w.stream()
        assert caught.value.field == "model"
        with pytest.raises(NotFoundError, match='there is "big", "tiny"'):
            await w.stream(model="huge")
        await w.targets[1].stop()
        await until(lambda: "CONNECTING" in states(w.relay))
        with pytest.raises(UnavailableError, match="no target is ready"):
            await w.stream(model="big")
        assert w.text(await w.stream(model="tiny")) == "one"
        scraped = text_of(w.relay.metrics.metrics)
        assert value(scraped, "target_available", model="tiny") == 1
        assert value(scraped, "target_available", model="big") == 0

    big = FakeTarget(replace(TARGET_MODEL, name="big", weights_fingerprint="w2"))
    in_world(test, other_targets=[big])


def test_a_draft_guesses_only_for_the_model_it_fits() -> None:
    async def test(w: World) -> None:
        # It may have met the other target first, and is asked again soon.
        await until(lambda: states(w.relay) == ["READY", "READY", "READY"])
        for target in w.targets:
            target.script = [ending("x")]
        await w.stream(model="big")
        assert w.draft.opens == []
        await w.stream(model="tiny")
        await until(lambda: len(w.draft.opens) == 1)
        scraped = text_of(w.relay.metrics.metrics)
        assert value(scraped, "draft_available", model="tiny") == 1
        assert value(scraped, "draft_available", model="big") == 0

    big = FakeTarget(replace(TARGET_MODEL, name="big", noise_version="n2"))
    in_world(test, drafted=True, draft=FakeDraft(TARGET_MODEL), other_targets=[big])


def request(**fields: Any) -> GenerationRequest:
    made = GenerationRequest("r", TARGET_MODEL, (5, 6, 7), SamplingParams(temperature=0.0))
    return replace(made, **fields)


def test_a_further_choice_goes_to_its_parents_target_as_a_fork() -> None:
    async def test(w: World) -> None:
        parent = w.relay.open(request())
        child = w.relay.open(request(index=1), fork_of=parent)
        alone = w.relay.open(request())
        first, second = await opened_at(*w.targets)
        await until(lambda: len(first.opens) == 2 and second.opens)
        assert [o.fork_of for o in first.opens] == [0, parent.target_id]
        assert second.opens[0].fork_of == 0
        await first.stop()
        await until(lambda: len(second.opens) == 3)
        assert {o.fork_of for o in second.opens} == {0}
        orphan = w.relay.open(request(index=2), fork_of=parent)
        await until(lambda: len(second.opens) == 4)
        assert second.opens[3].fork_of == parent.target_id
        w.relay.close(parent)
        late = w.relay.open(request(index=3), fork_of=parent)
        await until(lambda: len(second.opens) == 5)
        assert second.opens[4].fork_of == 0
        for session in (child, alone, orphan, late):
            w.relay.close(session)

    between(test)


def test_what_the_client_has_already_is_neither_delivered_nor_discarded() -> None:
    async def test(w: World) -> None:
        given = TOKENIZER.encode("he")
        asked = request(output_prefix=given, cache_scope="me", lookahead=4)
        session = w.relay.open(asked)
        await until(lambda: w.target.opens and w.draft.opens)
        for opened in (w.target.opens[0], w.draft.opens[0]):
            assert opened.token_ids == (*asked.prompt, *given)
            assert opened.num_prompt == 3
            assert opened.cache_scope == "me"
        w.target.say(*verdicts(w.target.opens[0], ["ll", ending("o")]))
        told: list[Any] = [event async for event in session.events(TOKENIZER)]
        assert w.text(told) == "llo"
        assert (told[-1].usage.delivered, told[-1].usage.discarded) == (3, 0)
        w.relay.close(session)
        unread = w.relay.open(asked)
        w.relay.close(unread)
        assert unread.record().usage.discarded == 0

    in_world(test, drafted=True)


# -- drafts --------------------------------------------------------------------------------


def two_drafts(test: Callable[[World], Awaitable[None]], **settings: Any) -> None:
    in_world(test, drafted=True, other_drafts=[FakeDraft()], **settings)


def by_open(drafts: list[FakeDraft]) -> tuple[FakeDraft, FakeDraft]:
    first = next(d for d in drafts if d.opens)
    return first, next(d for d in drafts if d is not first)


def test_another_draft_takes_the_place_of_a_lost_one_at_once() -> None:
    async def test(w: World) -> None:
        async with streaming(w):
            await until(lambda: any(d.opens for d in w.drafts))
            first, second = by_open(list(w.drafts))
            at_target = w.target.opens[0]
            w.target.say(*verdicts(at_target, ["cd"]))
            await until(lambda: first.commits)
            await first.stop()
            await until(lambda: second.opens, "the new attachment")
            again = second.opens[0]
            assert again.token_ids == TOKENIZER.encode("abcd")
            second.propose(again.sequence_id, serial=0, start=4, text="e")
            await until(lambda: w.target.proposals)
            assert w.target.proposals[0].chain_id == ChainId(again.sequence_id, 0)
            w.target.say(*verdicts(at_target, [ending("e")], committed_len=4))
        assert reopens(w, "draft_lost") == 1

    two_drafts(test)


def test_a_draft_that_refuses_is_not_asked_again_but_another_one_is() -> None:
    async def test(w: World) -> None:
        async with streaming(w):
            await until(lambda: any(d.opens for d in w.drafts))
            first, second = by_open(list(w.drafts))
            full = SequenceError(8, "NO_CAPACITY", "full")
            first.say(Refusal(first.opens[0].sequence_id, full))
            await until(lambda: second.opens)
            second.say(Refusal(second.opens[0].sequence_id, full))
            await until(lambda: w.relay.status()[2].num_sequences == 0)
            await asyncio.sleep(0.05)
            assert [len(d.opens) for d in w.drafts] == [1, 1]
            w.target.say(*verdicts(w.target.opens[0], [ending("x")]))
        assert reopens(w, "draft_refused") == 1

    two_drafts(test)


def test_what_a_draining_draft_has_goes_to_another_one() -> None:
    async def test(w: World) -> None:
        async with streaming(w):
            await until(lambda: any(d.opens for d in w.drafts))
            first, second = by_open(list(w.drafts))
            first.say(Draining(5.0))
            await until(lambda: second.opens and first.closes)
            w.target.say(*verdicts(w.target.opens[0], [ending("x")]))
        assert reopens(w, "draft_draining") == 1
        assert w.target.closes == []

    two_drafts(test)


def test_requests_are_spread_over_drafts() -> None:
    async def test(w: World) -> None:
        tasks = [asyncio.create_task(w.stream()) for _ in range(6)]
        await until(lambda: sum(len(d.opens) for d in w.drafts) == 6)
        assert [len(d.opens) for d in w.drafts] == [3, 3]
        for opened in w.target.opens:
            w.target.say(*verdicts(opened, [ending("x")]))
        await asyncio.gather(*tasks)

    two_drafts(test)


# -- what is told of it --------------------------------------------------------------------


def test_a_failover_is_a_second_session_in_the_trace_and_its_parts_add_up() -> None:
    recorder = Recorder("gateway")
    told: list[Any] = []

    def timed(opened: OpenSequence, text: str, held: float, **fields: float) -> Verdict:
        (verdict,) = verdicts(opened, [text])
        return replace(verdict, timing=VerdictTiming(held_seconds=held, **fields))

    async def test(w: World) -> None:
        stream = w.client.stream("ab", explain=True)
        await anext(stream)
        first, second = await opened_at(*w.targets)
        await until(lambda: w.draft.opens)
        await asyncio.sleep(0.06)
        spent = {"queue_seconds": 0.01, "prefill_seconds": 0.03, "told_seconds": 0.01}
        first.say(timed(first.opens[0], "he", 0.05, **spent))
        await anext(stream)
        await first.stop()
        await until(lambda: second.opens)
        await asyncio.sleep(0.06)
        second.say(timed(second.opens[0], "y", 0.05, **spent))
        (last,) = verdicts(second.opens[0], [ending("!")], committed_len=5)
        spent = {"step_seconds": 0.004, "told_seconds": 0.006}
        second.say(replace(last, timing=VerdictTiming(held_seconds=0.05, **spent)))
        told.extend([event async for event in stream])

    between(test, drafted=True, spans=GatewaySpans(recorder.tracing))
    finished = told[-1]
    targets, drafts = recorder.named("target.session"), recorder.named("draft.session")
    assert [attributes(s)["session.reason"] for s in targets] == ["first", "target_lost"]
    assert [events(s) for s in targets] == [["target_lost"], []]
    assert [s.status.is_ok for s in targets] == [False, True]
    assert [attributes(s)["session.reason"] for s in drafts] == ["first", "target_lost"]
    (root,) = (s for s in recorder.spans if "/" in s.name)
    assert root.status.is_ok
    names = ("queue", "prefill", "steps", "wire", "gateway")
    parts = {name: attributes(root)[f"{name}_seconds"] for name in names}
    assert parts["queue"] == pytest.approx(0.02)
    assert parts["prefill"] == pytest.approx(0.06)
    assert parts["steps"] == pytest.approx(0.004 + 0.01 + 0.006)
    assert root.end_time is not None
    assert root.start_time is not None
    whole = (root.end_time - root.start_time) / 1e9
    assert sum(parts.values()) == pytest.approx(whole, abs=0.005)
    timing = finished.timing
    assert sum(getattr(timing, f"{name}_seconds") for name in names) == pytest.approx(
        timing.total_seconds, abs=1e-6
    )
    (moved,) = (f for f in finished.explanation.findings if f.kind == "moved")
    assert dict(moved.numbers)["num_moves"] == 1


def test_a_request_that_waited_in_vain_leaves_no_span_open() -> None:
    recorder = Recorder("gateway")

    async def test(w: World) -> None:
        stream = w.client.stream("ab")
        await anext(stream)
        await w.target.stop()
        with pytest.raises(UnavailableError):
            await anext(stream)

    in_world(test, spans=GatewaySpans(recorder.tracing), failover_seconds=0.1)
    assert sorted(s.name.rpartition("/")[2] for s in recorder.spans) == [
        "StreamGenerate", "target.session",
    ]  # fmt: skip
