"""Wrong requests over a real channel: each is named, and disturbs nothing after it."""

from __future__ import annotations

import asyncio
import functools
import json
import math
from collections.abc import Awaitable, Coroutine
from typing import Any

import grpc
import pytest
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

from common.errors import error_from_rpc
from common.tokenizer import Tokenizer
from gateway.spans import GatewaySpans
from tests.gateway.fakes import (
    EOS,
    TARGET_MODEL,
    TOKENIZER,
    FakeTarget,
    World,
    ending,
    until,
    world,
)
from tests.tracing import Recorder

INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND
HUGE, NAN, INF = 2**32 - 1, math.nan, math.inf
THE, A = TOKENIZER.encode("the")[0], TOKENIZER.encode("a")[0]


def spec(**given: Any) -> pb.GenerationSpec:
    """A good request, but for what is given; an input takes the place of the text."""
    if not {"text", "chat", "tokens"} & given.keys():
        given["text"] = "ab"
    return pb.GenerationSpec(**given)


def sampling(**given: Any) -> pb.GenerationSpec:
    return spec(sampling=given)


def bias(token_id: int, value: float) -> pb.GenerationSpec:
    return sampling(logit_bias={token_id: value})


def rule(number: int, **given: Any) -> pb.GenerationSpec:
    made = spec(**given)
    made.speculation.rule = number  # type: ignore[assignment]
    return made


def chat(*turns: tuple[str, str]) -> pb.GenerationSpec:
    messages = [pb.ChatMessage(role=role, content=content) for role, content in turns]
    return spec(chat=pb.ChatInput(messages=messages))


def tokens(*ids: int) -> pb.GenerationSpec:
    return spec(tokens=pb.TokenInput(token_ids=ids))


def resume(*prefix: int, **given: Any) -> pb.GenerationSpec:
    return spec(output_prefix_ids=prefix, **given)


WRONG: list[tuple[str, pb.GenerationSpec, grpc.StatusCode, str]] = [
    # what to continue
    ("no input", pb.GenerationSpec(), INVALID, "input"),
    ("empty text", spec(text=""), INVALID, "text"),
    ("text as long as the context", spec(text="x" * 1000), INVALID, "input"),
    ("text beyond the context", spec(text="x" * 5000), INVALID, "input"),
    ("text that is not even tokenized", spec(text="x" * 256_001), INVALID, "input"),
    ("no tokens", tokens(), INVALID, "tokens.token_ids"),
    ("token at the vocabulary's end", tokens(1, 260), INVALID, "tokens.token_ids[1]"),
    ("huge token", tokens(HUGE), INVALID, "tokens.token_ids[0]"),
    ("tokens as long as the context", tokens(*[1] * 1000), INVALID, "input"),
    ("no messages", chat(), INVALID, "chat.messages"),
    ("unknown role", chat(("user", "a"), ("robot", "b")), INVALID, "chat.messages[1].role"),
    ("empty role", chat(("", "a")), INVALID, "chat.messages[0].role"),
    ("upper-case role", chat(("User", "a")), INVALID, "chat.messages[0].role"),
    ("a role that fills a page", chat(("x" * 50_000, "a")), INVALID, "chat.messages[0].role"),
    ("what the template refuses", chat(("user", "a"), ("system", "b")), INVALID, "chat"),
    ("chat beyond the context", chat(("user", "x" * 990)), INVALID, "input"),
    ("chat that is not even rendered", chat(("user", "x" * 256_001)), INVALID, "input"),
    # names
    ("unknown model", spec(model="huge"), NOT_FOUND, "model"),
    ("a model's name that fills a page", spec(model="é" * 50_000), NOT_FOUND, "model"),
    ("long request id", spec(request_id="x" * 257), INVALID, "request_id"),
    ("request id with a line break", spec(request_id="a\nb"), INVALID, "request_id"),
    ("request id with a zero", spec(request_id="a\0b"), INVALID, "request_id"),
    ("long cache salt", spec(cache_salt="x" * 1025), INVALID, "cache_salt"),
    # numbers
    *(
        (f"{name} {value}", sampling(**{name: value}), INVALID, f"sampling.{name}")
        for name, values in {
            "temperature": (NAN, INF, -INF, -1e-9, 1e6, 1e308),
            "top_p": (NAN, INF, -INF, -0.1, 0.0, 1.0000001, 1e308),
            "min_p": (NAN, INF, -INF, -0.1, 1.0, 1e308),
            "repetition_penalty": (NAN, INF, -INF, -1.0, 0.0, 10.1, 1e308),
            "presence_penalty": (NAN, INF, -INF, -2.1, 2.1, 1e308),
            "frequency_penalty": (NAN, INF, -INF, -2.1, 2.1, 1e308),
        }.items()
        for value in values
    ),
    *(
        (f"logit bias {value}", bias(7, value), INVALID, "sampling.logit_bias[7]")
        for value in (NAN, INF, -INF, -100.1, 100.1, 1e308)
    ),
    ("bias of no token", bias(260, 1.0), INVALID, "sampling.logit_bias[260]"),
    ("bias of a huge token", bias(HUGE, 1.0), INVALID, f"sampling.logit_bias[{HUGE}]"),
    ("21 logprobs", sampling(num_logprobs=21), INVALID, "sampling.num_logprobs"),
    ("huge logprobs", sampling(num_logprobs=HUGE), INVALID, "sampling.num_logprobs"),
    ("min above max", sampling(min_tokens=6, max_tokens=5), INVALID, "sampling.min_tokens"),
    ("min above the default", sampling(min_tokens=257), INVALID, "sampling.min_tokens"),
    ("huge min", sampling(min_tokens=HUGE, max_tokens=HUGE), INVALID, "sampling.min_tokens"),
    # what is set elsewhere, and rules
    ("seed among the sampling", sampling(seed=1), INVALID, "sampling.seed"),
    ("rule among the sampling", sampling(rule=3), INVALID, "sampling.rule"),
    ("unknown rule among the sampling", sampling(rule=77), INVALID, "sampling.rule"),
    ("greedy rule at temperature 1", rule(1), INVALID, "speculation.rule"),
    ("unknown rule", rule(9), INVALID, "speculation.rule"),
    ("negative rule", rule(-1), INVALID, "speculation.rule"),
    # what ends a text
    ("stop id of no token", sampling(stop_token_ids=[1, 260]), INVALID,
     "sampling.stop_token_ids[1]"),
    ("huge stop id", sampling(stop_token_ids=[HUGE]), INVALID, "sampling.stop_token_ids[0]"),
    ("empty stop string", spec(stop_strings=["a", ""]), INVALID, "stop_strings[1]"),
    ("65 stop strings", spec(stop_strings=["a"] * 65), INVALID, "stop_strings"),
    ("long stop string", spec(stop_strings=["a", "x" * 1025]), INVALID, "stop_strings[1]"),
    # choices
    ("33 choices", spec(n=33), INVALID, "n"),
    ("huge choices", spec(n=HUGE), INVALID, "n"),
    # resuming
    ("prefix and choices", resume(A, n=2), INVALID, "output_prefix_ids"),
    ("prefix with no token", resume(A, 260), INVALID, "output_prefix_ids[1]"),
    ("prefix with a huge token", resume(HUGE), INVALID, "output_prefix_ids[0]"),
    ("prefix as long as max_tokens", resume(A, A, sampling={"max_tokens": 2}), INVALID,
     "output_prefix_ids"),
    ("prefix beyond max_tokens", resume(*[A] * 300), INVALID, "output_prefix_ids"),
    ("prefix that fills the context", resume(*[A] * 998, sampling={"max_tokens": HUGE}), INVALID,
     "output_prefix_ids"),
    ("prefix with the end in it", resume(A, EOS, A), INVALID, "output_prefix_ids[1]"),
    ("prefix with a stop id in it", resume(A, THE, sampling={"stop_token_ids": [THE]}), INVALID,
     "output_prefix_ids[1]"),
    ("prefix with a stop string in it", resume(A, THE, A, stop_strings=["zz", "ath"]), INVALID,
     "output_prefix_ids[1]"),
    ("prefix ending in a stop string", resume(A, A, stop_strings=["aa"]), INVALID,
     "output_prefix_ids[1]"),
]  # fmt: skip

ODD_BUT_RIGHT: list[tuple[str, pb.GenerationSpec]] = [
    ("one below the context", spec(text="x" * 999)),
    ("the last token", tokens(VOCAB := TARGET_MODEL.vocab_size - 1)),
    ("an empty message", chat(("user", ""))),
    ("the longest request id", spec(request_id="ü" * 256)),
    ("the longest salt", spec(cache_salt="x" * 1024)),
    ("most of everything", sampling(
        temperature=999_999, top_k=HUGE, top_p=1, min_p=0.999, repetition_penalty=10,
        presence_penalty=2, frequency_penalty=2, logit_bias={0: 100, VOCAB: -100},
        min_tokens=256, stop_token_ids=[VOCAB], num_logprobs=20)),
    ("least of everything", sampling(
        temperature=0, top_k=0, top_p=1e-300, min_p=0, repetition_penalty=1e-300,
        presence_penalty=-2, frequency_penalty=-2, min_tokens=0, num_logprobs=0)),
    ("max_tokens beyond the context", sampling(max_tokens=HUGE)),
    ("64 long stop strings", spec(stop_strings=[f"{i:1024}" for i in range(64)])),
    ("a huge lookahead", spec(speculation={"max_lookahead": HUGE})),
    ("the least priority", spec(priority=-(2**31))),
    ("the largest seed", spec(seed=2**64 - 1)),
    ("most choices", spec(n=32)),
    ("the end in a prefix that ignores it", resume(EOS, sampling={"ignore_eos": True})),
    ("a stop string that the prefix does not begin", resume(A, stop_strings=["ba"])),
]  # fmt: skip


class Together:
    """One gateway, and one channel to it, for a whole module of tests."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.target = FakeTarget()
        self.target.script = [ending("fine")]
        self.recorder = Recorder("gateway")

    async def open(self) -> None:
        self._world = world(target=self.target, spans=GatewaySpans(self.recorder.tracing))
        self.world: World = await self._world.__aenter__()
        self.channel = grpc.aio.insecure_channel(self.world.address)
        self.stub = gateway_pb2_grpc.GatewayServiceStub(self.channel)

    async def close(self) -> None:
        await self.channel.close()
        await self._world.__aexit__(None, None, None)
        self.recorder.tracing.shutdown(5.0)

    async def check_good(self) -> None:
        """A good request succeeds, and nothing is left of any."""
        answer = await self.stub.Generate(pb.GenerateRequest(spec=spec()), timeout=10)
        assert (answer.text, len(answer.token_ids)) == ("fine", 4)
        assert self.world.relay.num_live() == 0

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(asyncio.wait_for(test, 30))


@pytest.fixture(scope="module")
def gateway() -> Any:
    together = Together()
    together.run(together.open())
    yield together
    together.run(together.close())
    together.loop.close()


async def refusal(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call must fail")


async def read_all(call: Any) -> list[pb.StreamGenerateResponse]:
    return [response async for response in call]


@pytest.mark.parametrize(
    ("wrong", "code", "field"), [row[1:] for row in WRONG], ids=[row[0] for row in WRONG]
)
def test_a_wrong_request_is_named_and_the_next_one_is_served(
    gateway: Together, wrong: pb.GenerationSpec, code: grpc.StatusCode, field: str
) -> None:
    async def test() -> None:
        num_opened = len(gateway.target.opens)
        stub = gateway.stub
        for call in (
            stub.Generate(pb.GenerateRequest(spec=wrong)),
            read_all(stub.StreamGenerate(pb.StreamGenerateRequest(spec=wrong))),
        ):
            error = await refusal(call)
            told = error_from_rpc(error)
            assert (error.code(), told.field) == (code, field), error.details()
            assert told.message
            assert len(told.message) <= 400
            assert error.details() == f"{field}: {told.message}" or told.message.endswith("…")
        assert len(gateway.target.opens) == num_opened  # the target has heard nothing of it
        await gateway.check_good()

    gateway.run(test())


def test_the_table_is_long_enough() -> None:
    names = [name for name, *_ in WRONG]
    assert len(set(names)) == len(names) >= 60


@pytest.mark.parametrize(
    "right", [row[1] for row in ODD_BUT_RIGHT], ids=[row[0] for row in ODD_BUT_RIGHT]
)
def test_what_is_only_odd_is_served(gateway: Together, right: pb.GenerationSpec) -> None:
    async def test() -> None:
        answer = await gateway.stub.Generate(pb.GenerateRequest(spec=right), timeout=20)
        assert answer.text == "fine"
        assert len(answer.further_choices) == max(right.n, 1) - 1

    gateway.run(test())


async def raw(gateway: Together, message: bytes) -> pb.GenerateResponse:
    """A call with bytes that no library of ours would send."""
    call: Any = gateway.channel.unary_unary("/tandem.v1.GatewayService/Generate")
    return pb.GenerateResponse.FromString(await call(message))


MALFORMED = {
    "cut short": pb.GenerateRequest(spec=spec(text="abcdef")).SerializeToString()[:-3],
    "an input of the wrong kind": b"\x0a\x02\x18\x05",  # spec.text as a number: an unknown field
    "text that is no UTF-8": b"\x0a\x04\x1a\x02\xff\xfe",
    "noise": bytes(range(255, 200, -1)),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_message_is_refused_and_the_next_one_is_served(
    gateway: Together, name: str
) -> None:
    async def test() -> None:
        error = await refusal(raw(gateway, MALFORMED[name]))
        # gRPC itself fails on what is no message; a field of another kind is an unknown one.
        expected = INVALID if name == "an input of the wrong kind" else grpc.StatusCode.UNKNOWN
        assert error.code() is expected, error.details()
        await gateway.check_good()

    gateway.run(test())


def test_of_two_inputs_the_last_one_counts(gateway: Together) -> None:
    text, ids = spec(text="ab").SerializeToString(), tokens(1, 2, 3).SerializeToString()
    both = (
        pb.GenerateRequest().SerializeToString() + b"\x0a" + bytes([len(text + ids)]) + text + ids
    )

    async def test() -> None:
        answer = await raw(gateway, both)
        assert answer.started.num_prompt_tokens == 3

    gateway.run(test())


@pytest.mark.parametrize("timeout", [0.0, -1.0, 1e-6])
def test_a_deadline_that_is_over_is_told_and_the_next_request_is_served(
    gateway: Together, timeout: float
) -> None:
    def ask() -> grpc.StatusCode:  # grpc.aio takes 0 for no deadline at all
        with grpc.insecure_channel(gateway.world.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            try:
                stub.Generate(pb.GenerateRequest(spec=spec()), timeout=timeout)
            except grpc.RpcError as error:
                code: grpc.StatusCode = error.code()
                return code
        raise AssertionError("the call must fail")

    async def test() -> None:
        script, gateway.target.script = gateway.target.script, []  # no answer is fast enough
        assert await asyncio.to_thread(ask) is grpc.StatusCode.DEADLINE_EXCEEDED
        gateway.target.script = script
        await until(lambda: gateway.world.relay.num_live() == 0)
        await gateway.check_good()

    gateway.run(test())


NO_TRACE = [
    "",
    "garbage",
    f"00-{'0' * 32}-{'0' * 16}-01",
    f"ff-{'a' * 32}-{'b' * 16}-01",
    "0" * 5000,
]


def test_a_trace_context_that_is_none_is_no_error() -> None:
    recorder = Recorder("gateway")

    async def main() -> None:
        target = FakeTarget()
        target.script = [ending("fine")]
        spans = GatewaySpans(recorder.tracing)
        async with (
            world(target=target, spans=spans) as w,
            grpc.aio.insecure_channel(w.address) as channel,
        ):
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            for traceparent in NO_TRACE:
                answer = await stub.Generate(
                    pb.GenerateRequest(spec=spec()), metadata=(("traceparent", traceparent),)
                )
                assert answer.text == "fine"

    asyncio.run(main())
    roots = recorder.named("tandem.v1.GatewayService/Generate")
    assert [root.parent for root in roots] == [None] * len(NO_TRACE)


@functools.cache
def files_without_template() -> dict[str, bytes]:
    files = dict(FakeTarget().files)
    settings = json.loads(files["tokenizer_config.json"])
    del settings["chat_template"]
    return files | {"tokenizer_config.json": json.dumps(settings).encode()}


def test_a_chat_with_a_model_that_has_no_template_says_so() -> None:
    async def main() -> None:
        target = FakeTarget()
        target.files = files_without_template()
        target.script = [ending("fine")]
        assert Tokenizer(target.files).fingerprint == TARGET_MODEL.tokenizer_fingerprint
        async with world(target=target) as w, grpc.aio.insecure_channel(w.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            error = await refusal(stub.Generate(pb.GenerateRequest(spec=chat(("user", "hi")))))
            told = error_from_rpc(error)
            assert (error.code(), told.field) == (INVALID, "chat")
            assert "no chat template" in told.message
            assert "send text instead" in told.message
            assert (await stub.Generate(pb.GenerateRequest(spec=spec()))).text == "fine"

    asyncio.run(main())


def test_more_choices_than_the_gateway_ever_serves_are_wrong_not_early() -> None:
    async def main() -> None:
        async with world(max_live_requests=3) as w, grpc.aio.insecure_channel(w.address) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            error = await refusal(stub.Generate(pb.GenerateRequest(spec=spec(n=4))))
            assert (error.code(), error.details()) == (INVALID, "n: is 4, must be 1 to 3")

    asyncio.run(main())
