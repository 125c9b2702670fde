"""Several texts for one prompt: one stream, seeds of their own, all or none."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc
import pytest
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

from common.errors import (
    CapacityError,
    InternalFaultError,
    SequenceError,
    TimedOutError,
)
from common.seeds import hash_seed
from common.types import OpenSequence, Progress, Verdict
from gateway.client import Client, Delta, Finished, Started
from gateway.client import Progress as Waiting
from gateway.spans import GatewaySpans
from tests.gateway.fakes import TOKENIZER, FakeTarget, World, ending, in_world, until, verdicts
from tests.tracing import Recorder, attributes

FAILURE = SequenceError(grpc.StatusCode.INTERNAL.value[0], "INTERNAL_FAULT", "its logits are NaN")


class Scripted(FakeTarget):
    """Says a script of its own for each sequence, in the order of their opening."""

    def __init__(self, *scripts: list[Any]) -> None:
        super().__init__()
        self.scripts = list(scripts)

    def opened(self, sequence: OpenSequence) -> None:
        if self.scripts:
            self.say(*verdicts(sequence, self.scripts.pop(0)))


def test_choices_differ_in_seed_and_index_only() -> None:
    target = Scripted(["on", ending("e")], [ending("two")], ["thr", "e", ending("e")])

    async def test(w: World) -> None:
        answer = await w.client.generate("ab", n=3, seed=17, cache_salt="s", max_tokens=9)
        assert [choice.text for choice in answer.choices] == ["one", "two", "three"]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert (answer.text, answer.finished) == ("one", answer.choices[0].finished)
        assert (answer.started.n, answer.started.seed) == (3, 17)
        for choice in answer.choices:
            assert choice.token_ids == TOKENIZER.encode(choice.text)
            assert choice.finished.index == choice.index
            assert choice.finished.usage.delivered == len(choice.token_ids)
        opens = target.opens
        assert [o.sampling.seed for o in opens] == [hash_seed(17, i) for i in range(3)]
        assert [o.fork_of for o in opens] == [0, opens[0].sequence_id, opens[0].sequence_id]
        assert {(o.token_ids, o.cache_scope, o.sampling.max_tokens) for o in opens} == {
            (TOKENIZER.encode("ab"), opens[0].cache_scope, 9)
        }
        assert "and 2 more" in repr(answer)
        assert w.relay.num_live() == 0

    in_world(test, target=target)


def test_one_stream_tells_of_all_choices() -> None:
    target = Scripted(["on", ending("e")], [ending("two")], [ending("3")])

    async def test(w: World) -> None:
        events = await w.stream("ab", n=3)
        assert isinstance(events[0], Started)
        assert sum(isinstance(event, Started) for event in events) == 1
        finished = [event for event in events if isinstance(event, Finished)]
        assert sorted(event.index for event in finished) == [0, 1, 2]
        assert isinstance(events[-1], Finished)
        for index, text in enumerate(["one", "two", "3"]):
            mine = [e for e in events if isinstance(e, Delta | Finished) and e.index == index]
            assert isinstance(mine[-1], Finished)
            assert w.text(mine) == text
            assert all(isinstance(event, Delta) for event in mine[:-1])

    in_world(test, target=target)


def test_choices_take_turns() -> None:
    async def test(w: World) -> None:
        many = 40
        calls = asyncio.create_task(w.stream("ab", n=3, max_tokens=2 * many))
        await until(lambda: len(w.target.opens) == 3)
        for sequence in w.target.opens:  # one after the other, in one batch
            w.target.say(*verdicts(sequence, ["x"] * many + [ending("y")]))
        indices = [event.index for event in await calls if isinstance(event, Delta)]
        assert len(indices) == 3 * (many + 1)
        # Whoever comes first may be ahead at the beginning; from then on it is one by one.
        for begin in range(0, 3 * many, 3):
            counts = [indices[: begin + 3].count(i) for i in range(3)]
            assert max(counts) - min(counts) <= 3, counts

    in_world(test)


def test_progress_is_the_first_choices() -> None:
    async def test(w: World) -> None:
        call = asyncio.create_task(w.stream("ab", n=2))
        await until(lambda: len(w.target.opens) == 2)
        first, second = w.target.opens
        w.target.say(Progress(second.sequence_id, 5, 0))
        w.target.say(Progress(first.sequence_id, 4, 1))
        await asyncio.sleep(0.1)
        for sequence in (first, second):
            w.target.say(*verdicts(sequence, [ending("x")]))
        told = [event for event in await call if isinstance(event, Waiting)]
        assert told == [Waiting(4, 1)]

    in_world(test)


@pytest.mark.parametrize("way", ["stream", "generate"])
def test_a_choice_that_fails_ends_the_request_and_closes_the_others(way: str) -> None:
    failing = Verdict(0, 0, 0, 0, (), error=FAILURE)
    target = Scripted(["a"], ["b", failing], ["c"])

    async def test(w: World) -> None:
        call = w.stream(n=3) if way == "stream" else w.client.generate("ab", n=3)
        with pytest.raises(InternalFaultError, match="NaN"):
            await call
        first, _, third = (sequence.sequence_id for sequence in target.opens)
        await until(lambda: sorted(target.closes) == [first, third], "the closes")
        assert w.relay.num_live() == 0

    in_world(test, target=target)


@pytest.mark.parametrize("way", ["stream", "generate"])
def test_a_client_that_goes_closes_all(way: str) -> None:
    async def test(w: World) -> None:
        call = w.stream(n=3) if way == "stream" else w.client.generate("ab", n=3)
        task: asyncio.Task[Any] = asyncio.create_task(call)
        await until(lambda: len(w.target.opens) == 3 and len(w.draft.opens) == 3)
        task.cancel()
        await until(lambda: len(w.target.closes) == 3 and len(w.draft.closes) == 3, "the closes")
        assert sorted(w.target.closes) == [o.sequence_id for o in w.target.opens]
        assert w.relay.num_live() == 0

    in_world(test, drafted=True)


def test_a_deadline_closes_all() -> None:
    async def test(w: World) -> None:
        with pytest.raises(TimedOutError):
            await w.client.generate("ab", n=3, timeout=0.2)
        await until(lambda: len(w.target.closes) == 3, "the closes")

    in_world(test)


def test_a_client_that_does_not_read_loses_all() -> None:
    async def test(w: World) -> None:
        wide = "the " * 12_000  # more than the transport buffers
        w.target.script = [wide] * 15
        async with grpc.aio.insecure_channel(w.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            call = stub.StreamGenerate(
                pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="ab", n=2))
            )
            await call.read()
            await until(lambda: len(w.target.closes) == 2, "the closes", 15.0)
            await until(lambda: w.relay.num_live() == 0)
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert await call.code() is grpc.StatusCode.CANCELLED

    in_world(test, client_stall_seconds=0.3)


def test_choices_count_as_requests_and_open_all_or_none() -> None:
    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream("ab", n=2))
        await until(lambda: len(w.target.opens) == 2)
        assert w.relay.num_live() == 2
        with pytest.raises(CapacityError, match="2 choices are asked for, 1 of the 3") as full:
            await w.client.generate("ab", n=2)
        assert full.value.retry_after_seconds == 1.0
        assert (w.relay.num_live(), len(w.target.opens)) == (2, 2)
        w.target.script = [ending("one")]
        assert (await w.client.generate("ab")).text == "one"
        task.cancel()

    in_world(test, max_live_requests=3)


def test_a_choice_that_has_ended_makes_room() -> None:
    target = Scripted(["a"], [ending("b")])

    async def test(w: World) -> None:
        task = asyncio.create_task(w.stream("ab", n=2))
        await until(lambda: w.relay.num_live() == 1 and len(target.opens) == 2)
        task.cancel()

    in_world(test, target=target)


def test_every_choice_can_be_explained() -> None:
    target = Scripted([ending("one")], [ending("second")])

    async def test(w: World) -> None:
        answer = await w.client.generate("ab", n=2, request_id="mine", explain=True)
        told = [choice.finished.explanation for choice in answer.choices]
        assert [explanation and explanation.request_id for explanation in told] == [
            "mine",
            "mine/1",
        ]
        assert "3 tokens" in (await w.client.explain("mine")).summary[0]
        assert "6 tokens" in (await w.client.explain("mine/1")).summary[0]

    in_world(test, target=target)


def test_the_first_choice_is_traced() -> None:
    target, recorder = Scripted([ending("one")], [ending("second")]), Recorder("gateway")

    async def test(w: World) -> None:
        await w.client.generate("ab", n=2)
        first, second = target.opens
        assert first.traceparent
        assert second.traceparent == ""

    in_world(test, target=target, spans=GatewaySpans(recorder.tracing))
    session, root = recorder.spans
    assert (session.name, root.name) == ("target.session", "tandem.v1.GatewayService/Generate")
    assert attributes(root)["num_delivered"] == 3
    assert attributes(root)["rpc.grpc.status_code"] == 0


def test_the_sync_client_hears_all_choices() -> None:
    target = Scripted([ending("one")], [ending("two")])

    def use(address: str) -> None:
        with Client(address) as client:
            assert [c.text for c in client.generate("ab", n=2).choices] == ["one", "two"]

    async def test(w: World) -> None:
        await asyncio.to_thread(use, w.address)

    in_world(test, target=target)
