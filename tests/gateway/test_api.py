"""What clients send and get: checks, errors, cancellation, stop strings."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import subprocess
import sys
from dataclasses import replace
from typing import Any

import grpc
import pytest
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

from common.errors import (
    CapacityError,
    InternalFaultError,
    InvalidRequestError,
    NotFoundError,
    TimedOutError,
)
from common.types import FinishReason, Rule, SamplingParams, TopLogprobs, Verdict
from gateway.client import Client, Delta, Finished, Message, Options
from gateway.config import GatewayConfig
from gateway.fit import Served
from gateway.spec import read_spec
from tests.gateway.fakes import EOS, TARGET_MODEL, TOKENIZER, World, ending, in_world, until, world

SERVED = Served(TARGET_MODEL, TOKENIZER)
CONFIG = GatewayConfig()


def test_defaults_and_harmless_values_are_taken() -> None:
    plain = read_spec(pb.GenerationSpec(text="the</s>"), SERVED, CONFIG, 8)
    assert plain.prompt == (257, EOS)
    assert plain.request_id
    assert plain.lookahead == 8
    assert (plain.sampling.temperature, plain.sampling.top_p) == (1.0, 1.0)
    assert plain.sampling.max_tokens == 256
    assert plain.sampling.rule is Rule.COUPLED
    other = read_spec(pb.GenerationSpec(text="the"), SERVED, CONFIG, 8)
    assert plain.sampling.seed != other.sampling.seed
    assert plain.request_id != other.request_id
    harmless = pb.GenerationSpec(text="ab", n=1, seed=0)
    harmless.sampling.repetition_penalty = 1.0
    assert read_spec(harmless, SERVED, CONFIG, 8).sampling.seed == 0


@pytest.mark.parametrize(
    ("num_prompt", "asked", "granted"), [(999, 0, 1), (900, 0, 100), (10, 0, 256), (10, 5000, 990)]
)
def test_max_tokens_is_clipped_to_the_context(num_prompt: int, asked: int, granted: int) -> None:
    request = pb.GenerationSpec(tokens=pb.TokenInput(token_ids=[1] * num_prompt))
    request.sampling.max_tokens = asked
    assert read_spec(request, SERVED, CONFIG, 8).sampling.max_tokens == granted


@pytest.mark.parametrize(
    ("options", "lookahead"),
    [
        ({}, 8),
        ({"max_lookahead": 3}, 3),
        ({"max_lookahead": 99}, 8),
        ({"max_lookahead": 0}, 0),
        ({"disabled": True, "max_lookahead": 3}, 0),
    ],
)
def test_lookahead_is_the_least_of_all(options: dict[str, Any], lookahead: int) -> None:
    request = pb.GenerationSpec(text="a", speculation=pb.SpeculationOptions(**options))
    assert read_spec(request, SERVED, CONFIG, 8).lookahead == lookahead


def test_chat_ends_where_the_assistant_begins() -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="hi")])
    request = read_spec(pb.GenerationSpec(chat=chat), SERVED, CONFIG, 8)
    assert request.prompt == TOKENIZER.encode("<s>user:hi<s>assistant:")


def test_everything_that_shapes_p_reaches_the_target() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("hello")]
        asked = Options(
            temperature=0.5,
            top_k=9,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-2,
            frequency_penalty=2,
            logit_bias={7: -100, 3: 2.5},
            min_tokens=4,
            max_tokens=9,
            stop_token_ids=(5, 6),
            ignore_eos=True,
            logprobs=3,
            seed=11,
            rule="rejection",
            cache_salt="mine",
            priority=-3,
        )
        await w.client.generate("ab", asked)
        opened = w.target.opens[0]
        assert opened.sampling == SamplingParams(
            temperature=0.5,
            top_k=9,
            top_p=0.5,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-2.0,
            frequency_penalty=2.0,
            logit_bias=((3, 2.5), (7, -100.0)),
            min_tokens=4,
            max_tokens=9,
            stop_token_ids=(5, 6),
            ignore_eos=True,
            num_logprobs=3,
            seed=11,
            rule=Rule.REJECTION,
        )
        assert opened.priority == -3
        assert opened.cache_scope == hashlib.sha256(b"mine").hexdigest()[:16]
        await w.client.generate("ab")
        assert w.target.opens[1].cache_scope == ""

    in_world(test)


def test_logprobs_come_token_by_token_and_end_with_the_text() -> None:
    ids = TOKENIZER.encode("ab.c")
    tops = tuple(TopLogprobs((i, 1), (-0.5, -2.0)) for i in ids)
    told = Verdict(0, 0, 0, 0, ids, logprobs=(-0.5, -1.5, -0.25, -4.0), top_logprobs=tops)

    async def test(w: World) -> None:
        first = replace(told, token_ids=ids[:2], logprobs=(-0.5, -1.5), top_logprobs=tops[:2])
        w.target.script = [first, told]
        answer = await w.client.generate("q", logprobs=2, stop=".")
        assert answer.text == "abab"
        assert answer.token_ids == ids[:2] + ids[:3]
        assert answer.logprobs == (-0.5, -1.5, -0.5, -1.5, -0.25)
        assert answer.top_logprobs == tops[:2] + tops[:3]
        deltas = [e for e in await w.stream("q", logprobs=2, stop=".") if isinstance(e, Delta)]
        assert [delta.logprobs for delta in deltas] == [(-0.5, -1.5), (-0.5, -1.5, -0.25)]
        assert deltas[1].top_logprobs == tops[:3]

    in_world(test)


def test_errors_reach_clients_with_code_field_and_retry_time() -> None:
    async def test(w: World) -> None:
        with pytest.raises(InvalidRequestError) as invalid:
            await w.client.generate("ab", top_p=2)
        assert str(invalid.value) == "sampling.top_p: is 2.0, must be above 0, at most 1"
        with pytest.raises(InvalidRequestError):
            await w.stream("ab", stop=("a", ""))
        with pytest.raises(NotFoundError, match='"tiny"'):
            await w.stream("ab", model="huge")
        task = asyncio.create_task(w.stream("ab", model="tiny"))
        await until(lambda: w.target.opens)
        with pytest.raises(CapacityError) as full:
            await w.client.generate("ab")
        assert full.value.retry_after_seconds == 1.0
        task.cancel()
        assert w.draft.opens == []

    in_world(test, max_live_requests=1)


def test_a_fault_of_ours_is_internal(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(w: World) -> None:
        monkeypatch.setattr(w.relay, "status", lambda: 1 / 0)
        with pytest.raises(InternalFaultError, match="see its log"):
            await w.client.status()
        assert "ZeroDivisionError" in caplog.text

    in_world(test)


@pytest.mark.parametrize("way", ["stream", "generate"])
def test_a_client_that_goes_closes_both_sides(way: str) -> None:
    async def test(w: World) -> None:
        call = w.stream() if way == "stream" else w.client.generate("ab")
        task: asyncio.Task[Any] = asyncio.create_task(call)
        await until(lambda: w.draft.opens and w.target.opens)
        task.cancel()
        await until(lambda: w.target.closes and w.draft.closes, "the closes")
        assert w.target.closes == [w.target.opens[0].sequence_id]
        assert w.draft.closes == [w.draft.opens[0].sequence_id]
        assert w.relay.num_live() == 0

    in_world(test, drafted=True)


@pytest.mark.parametrize("way", ["stream", "generate"])
def test_a_deadline_closes_both_sides(way: str) -> None:
    async def test(w: World) -> None:
        with pytest.raises(TimedOutError):
            await (
                w.stream(timeout=0.2) if way == "stream" else w.client.generate("ab", timeout=0.2)
            )
        await until(lambda: w.target.closes and w.draft.closes, "the closes")
        timeout = w.target.opens[0].timeout_seconds
        assert timeout is not None
        assert 0.0 < timeout < 0.25

    in_world(test, drafted=True)


STOPS: list[tuple[list[str], tuple[str, ...], str, str, int]] = [
    (["he", "llo", " you"], ("llo",), "he", "llo", 5),
    (["he", "llo", " you"], ("ell",), "h", "ell", 4),
    (["hello you"], ("l", "o"), "he", "l", 3),
    (["he", "l", "lo", " you"], ("lp", "o y"), "hell", "o y", 7),
    (["abab", "abc"], ("babc", "abcd"), "aba", "babc", 7),
    (["hé", "llo"], ("él",), "h", "él", 4),
]


@pytest.mark.parametrize(("script", "stop", "text", "found", "delivered"), STOPS)
def test_a_stop_string_ends_the_text_and_closes_both_sides(
    script: list[str], stop: tuple[str, ...], text: str, found: str, delivered: int
) -> None:
    async def test(w: World) -> None:
        w.target.script = script
        events = await w.stream(stop=stop)
        finished = events[-1]
        assert isinstance(finished, Finished)
        assert w.text(events) == text
        assert (finished.reason, finished.stop) == (FinishReason.STOP_STRING, found)
        assert finished.usage.delivered == delivered
        assert finished.usage.delivered == sum(
            len(event.token_ids) for event in events if isinstance(event, Delta)
        )
        # Verdicts after the stop may or may not have arrived by then.
        num_decided = len(TOKENIZER.encode("".join(script)))
        assert finished.usage.discarded <= num_decided - delivered
        await until(lambda: w.target.closes and w.draft.closes)

    in_world(test, drafted=True)


def test_a_stop_string_that_never_completes_is_text() -> None:
    async def test(w: World) -> None:
        w.target.script = ["he", "ll", ending("x")]
        events = await w.stream(stop=("hello", "xy", "llx!"))
        assert w.text(events) == "hellx"
        assert events[-1].reason is FinishReason.LENGTH
        assert events[-1].stop == ""

    in_world(test)


def test_tokens_of_a_verdict_beyond_the_stop_are_discarded() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("ab.cdef", FinishReason.STOP_TOKEN)]
        for stop in (".", ("z", ".")):
            answer = await w.client.generate("x", stop=stop)
            assert answer.text == "ab"
            assert answer.finished.reason is FinishReason.STOP_STRING
            assert (answer.finished.usage.delivered, answer.finished.usage.discarded) == (3, 4)
        assert w.target.closes == []  # it had ended

    in_world(test)


def test_a_stop_token_is_delivered_but_is_no_text() -> None:
    async def test(w: World) -> None:
        ids = TOKENIZER.encode("hi.")
        w.target.script = [Verdict(0, 0, 0, 0, ids, finish_reason=FinishReason.STOP_TOKEN)]
        answer = await w.client.generate("x", stop_token_ids=(ids[-1],))
        assert (answer.text, answer.token_ids) == ("hi", ids)

    in_world(test)


def test_a_client_that_does_not_read_is_cancelled() -> None:
    async def main() -> None:
        async with world(client_stall_seconds=0.3) as w:
            wide = "the " * 12_000  # more than the transport buffers
            async with grpc.aio.insecure_channel(w.address) as channel:
                stub = gateway_pb2_grpc.GatewayServiceStub(channel)
                request = pb.StreamGenerateRequest(spec=pb.GenerationSpec(text="ab"))
                w.target.script = [wide] * 30
                call = stub.StreamGenerate(request)
                await call.read()
                await until(lambda: w.target.closes, "the close", 15.0)
                await until(lambda: w.relay.num_live() == 0)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    while await call.read() is not grpc.aio.EOF:
                        pass
                assert await call.code() is grpc.StatusCode.CANCELLED

    asyncio.run(main())


def test_the_sync_client_does_the_same() -> None:
    def use(address: str) -> None:
        with Client(address) as client:
            options = Options(temperature=0.0, seed=3)
            answer = client.generate([Message("user", "hi")], options, max_tokens=9)
            assert (answer.text, answer.started.seed) == ("hello", 3)
            assert answer.started.rule is Rule.GREEDY
            events = list(client.stream([1, 2, 3]))
            assert isinstance(events[-1], Finished)
            assert client.status().peers[0].model == TARGET_MODEL
            assert client.models() == (TARGET_MODEL,)
            with pytest.raises(NotFoundError):
                client.generate("a", model="none")
            with pytest.raises(InvalidRequestError):
                list(client.stream(""))
            for _ in client.stream("left early"):
                break

    async def test(w: World) -> None:
        w.target.script = ["he", ending("llo")]
        await asyncio.to_thread(use, w.address)

    in_world(test)


def test_the_gateway_leaves_torch_out() -> None:
    code = (
        "import sys, gateway.__main__, gateway.cli, gateway.client;"
        "assert 'torch' not in sys.modules, 'torch is imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
