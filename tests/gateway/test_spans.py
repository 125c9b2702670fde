"""The gateway's spans, between fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from common.errors import (
    AbandonedError,
    InvalidRequestError,
    TimedOutError,
    UnavailableError,
    sequence_error,
)
from common.types import ChainId, Proposal, Refusal, VerdictTiming
from gateway.spans import GatewaySpans
from tests.gateway.fakes import TOKENIZER, World, ending, states, until, verdicts, world
from tests.tracing import CALLER, UNSAMPLED, Recorder, attributes, events


def trace(test: Callable[[World], Awaitable[None]], drafted: bool = False) -> Recorder:
    """Run a test in a traced gateway between fakes."""
    recorder = Recorder("gateway")

    async def main() -> None:
        spans = GatewaySpans(recorder.tracing)
        async with world(drafted=drafted, spans=spans, failover_seconds=0.1) as w:
            await test(w)

    asyncio.run(main())
    return recorder


def test_a_finished_request() -> None:
    async def test(w: World) -> None:
        held = VerdictTiming(0.001, 0.002, 0.0, 0.004)
        last = replace(ending("o!"), num_tested=1, num_accepted=1)
        w.target.script = [replace(ending("hell"), finish_reason=None, timing=held), last]
        await w.stream("ab", request_id="mine", traceparent=CALLER, seed=2**64 - 1, top_k=5)
        opened = w.target.opens[0].traceparent
        assert opened.split("-")[1] == CALLER.split("-")[1]

    recorder = trace(test)
    session, root = recorder.spans
    assert root.name == "tandem.v1.GatewayService/StreamGenerate"
    assert root.parent is not None
    assert root.parent.span_id == 0xEF01
    found = attributes(root)
    assert found["request.id"] == "mine"
    assert found["rpc.grpc.status_code"] == 0
    assert found["gen_ai.request.seed"] == -1
    assert found["gen_ai.request.top_k"] == 5.0
    assert found["gen_ai.operation.name"] == "text_completion"
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert (found["finish_reason"], found["num_delivered"], found["num_tested"]) == (
        "length", len(TOKENIZER.encode("hello!")), 1,
    )  # fmt: skip
    assert found["queue_seconds"] == 0.001
    assert events(root) == ["first_token"]
    assert session.name == "target.session"
    assert session.parent == root.context
    assert attributes(session)["session.reason"] == "first"
    assert attributes(session)["wire_seconds"] > 0


def test_what_is_not_sampled_leaves_nothing() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("hello")]
        await w.stream("ab", traceparent=UNSAMPLED)
        assert w.target.opens[0].traceparent == ""

    assert trace(test, drafted=True).spans == []


def test_a_bad_request_has_a_root_alone() -> None:
    async def test(w: World) -> None:
        with pytest.raises(InvalidRequestError):
            await w.stream("ab", top_p=2.0)

    (root,) = trace(test).spans
    assert attributes(root)["rpc.grpc.status_code"] == 3
    assert attributes(root)["request.id"]
    assert root.status.description is not None
    assert "top_p" in root.status.description


def test_cancelled_and_late() -> None:
    async def test(w: World) -> None:
        stream = w.client.stream("ab", request_id="cancelled")
        await anext(stream)
        await stream.aclose()
        with pytest.raises((TimedOutError, AbandonedError)):
            await w.stream("ab", request_id="late", timeout=0.2)
        await until(lambda: w.relay.num_live() == 0)
        await asyncio.sleep(0.05)

    recorder = trace(test, drafted=True)
    spans = {attributes(s).get("request.id"): s for s in recorder.spans}
    assert events(spans["cancelled"]) == ["cancelled"]
    assert attributes(spans["cancelled"])["rpc.grpc.status_code"] == 1
    assert events(spans["late"]) == ["deadline"]
    assert attributes(spans["late"])["rpc.grpc.status_code"] == 4
    sessions = recorder.named("target.session") + recorder.named("draft.session")
    assert sorted(e for s in sessions for e in events(s)) == [
        "cancelled", "cancelled", "deadline", "deadline",
    ]  # fmt: skip


def test_the_target_gives_up_or_is_lost() -> None:
    async def test(w: World) -> None:
        error = sequence_error(InvalidRequestError("is too long", field="input"))
        w.target.script = [replace(ending(""), finish_reason=None, error=error)]
        with pytest.raises(InvalidRequestError):
            await w.stream("ab")
        w.target.script = []
        stream = w.client.stream("ab")
        await anext(stream)
        await w.target.stop()
        with pytest.raises(UnavailableError):
            await anext(stream)

    sessions = trace(test).named("target.session")
    assert [events(s) for s in sessions] == [[], ["target_lost"]]
    assert [s.status.is_ok for s in sessions] == [False, False]


def test_a_draft_that_comes_back_is_a_second_session() -> None:
    async def test(w: World) -> None:
        stream = w.client.stream("ab")
        await anext(stream)
        await until(lambda: w.draft.opens)
        first = w.draft.opens[0]
        held = Proposal(first.sequence_id, ChainId(0, 0), 2, 2, (5, 6), (), CALLER, 0.001)
        w.draft.say(held)
        await until(lambda: w.target.proposals)
        assert w.target.proposals[0].traceparent == CALLER
        target = w.target.opens[0]
        (verdict,) = verdicts(target, ["x"])
        w.target.say(replace(verdict, traceparent=CALLER))
        await until(lambda: w.draft.commits)
        assert w.draft.commits[0].traceparent == CALLER
        await w.draft.stop()
        await until(lambda: states(w.relay)[1] != "READY")
        await w.draft.start()
        await until(lambda: len(w.draft.opens) == 2)
        refused = sequence_error(InvalidRequestError("is too long"))
        w.draft.say(Refusal(w.draft.opens[1].sequence_id, refused))
        await asyncio.sleep(0.1)
        w.target.say(*verdicts(target, [ending("y")], committed_len=3))
        async for _ in stream:
            pass

    first, second = trace(test, drafted=True).named("draft.session")
    assert [attributes(s)["session.reason"] for s in (first, second)] == [
        "first", "draft_returned",
    ]  # fmt: skip
    assert events(first) == ["draft_lost"]
    assert attributes(first)["num_drafted"] == 2
    assert attributes(first)["wire_seconds"] > -0.001
    assert second.status.description == "is too long"
    assert attributes(second)["num_drafted"] == 0
