"""Wrong values are named before they travel; right ones travel as they are."""

from __future__ import annotations

from typing import Any

import pytest
from tandem.v1 import types_pb2

from common.errors import (
    ConfigurationError,
    InvalidRequestError,
    TandemError,
    TimedOutError,
    UnavailableError,
)
from gateway.asking import beside, spec_to_pb
from gateway.client import Client, Message, Options
from tests.gateway.fakes import World, ending, in_world

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"top_k": -1}, "sampling.top_k"),
    ({"top_k": True}, "sampling.top_k"),
    ({"lookahead": -1}, "speculation.max_lookahead"),
    ({"priority": 2**31}, "priority"),
    ({"priority": -(2**31) - 1}, "priority"),
    ({"stop_token_ids": (3, -5)}, "sampling.stop_token_ids[1]"),
    ({"stop_token_ids": 5}, "sampling.stop_token_ids"),
    ({"temperature": "hot"}, "sampling.temperature"),
    ({"temperature": None}, "sampling.temperature"),
    ({"top_p": 10**400}, "sampling.top_p"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"max_tokens": 2.0}, "sampling.max_tokens"),
    ({"rule": "lucky"}, "speculation.rule"),
    ({"rule": 2}, "speculation.rule"),
    ({"stop": 5}, "stop_strings"),
    ({"stop": ("a", b"b")}, "stop_strings[1]"),
    ({"stop": b"b"}, "stop_strings"),
    ({"model": 3}, "model"),
    ({"model": "\udcff"}, "model"),
    ({"explain": 7}, "explain"),
    ({"speculate": None}, "speculate"),
    ({"ignore_eos": "no"}, "sampling.ignore_eos"),
    ({"timeout": 0}, "timeout"),
    ({"timeout": "soon"}, "timeout"),
    ({"timeout": float("nan")}, "timeout"),
    ({"traceparent": "ü"}, "traceparent"),
    ({"repetition_penalty": "1"}, "sampling.repetition_penalty"),
    ({"presence_penalty": None}, "sampling.presence_penalty"),
    ({"frequency_penalty": 1j}, "sampling.frequency_penalty"),
    ({"logit_bias": [(1, 2.0)]}, "sampling.logit_bias"),
    ({"logit_bias": {-1: 2.0}}, "sampling.logit_bias[-1]"),
    ({"logit_bias": {"a": 2.0}}, "sampling.logit_bias[a]"),
    ({"logit_bias": {1: "x"}}, "sampling.logit_bias[1]"),
    ({"min_tokens": -1}, "sampling.min_tokens"),
    ({"logprobs": -1}, "sampling.num_logprobs"),
    ({"logprobs": True}, "sampling.num_logprobs"),
    ({"n": 0}, "n"),
    ({"n": 1.0}, "n"),
    ({"output_prefix_ids": "ab"}, "output_prefix_ids"),
    ({"output_prefix_ids": [1, -1]}, "output_prefix_ids[1]"),
    ({"cache_salt": b"x"}, "cache_salt"),
    ({"cache_salt": "\udcff"}, "cache_salt"),
]


@pytest.mark.parametrize(("options", "field"), WRONG)
def test_a_wrong_option_is_named(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught, Client("127.0.0.1:1") as client:
        client.generate("hi", **options)
    assert caught.value.field == field


PROMPTS: list[tuple[Any, str]] = [
    (["hi"], "input"),
    (5, "input"),
    (b"hi", "input"),
    (None, "input"),
    ({"role": "user", "content": "hi"}, "input"),
    ([Message("user", "hi"), 5], "input"),
    ([1, "a"], "input"),
    ([1, -2], "tokens.token_ids[1]"),
    ([1, 2.5], "tokens.token_ids[1]"),
    ([{"role": "user"}], "chat.messages[0]"),
    ([{"role": "user", "content": "hi", "name": "Ann"}], "chat.messages[0]"),
    ([{"role": "user", "content": ["hi"]}], "chat.messages[0].content"),
    ([Message("user", "hi"), Message(1, "hi")], "chat.messages[1].role"),  # type: ignore[arg-type]
    ("caf\udce9", "text"),
]


@pytest.mark.parametrize(("prompt", "field"), PROMPTS)
def test_a_wrong_prompt_is_named(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        spec_to_pb(prompt, Options())
    assert caught.value.field == field


@pytest.mark.parametrize("rule", ["rejection", "Rejection", "REJECTION"])
def test_a_rule_may_be_a_name(rule: str) -> None:
    assert spec_to_pb("hi", Options(rule=rule)).speculation.rule == types_pb2.RULE_REJECTION


def test_messages_may_be_dicts() -> None:
    turns = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    objects = [Message("system", "be brief"), Message("user", "hi")]
    assert spec_to_pb(turns, Options()) == spec_to_pb(objects, Options())


def test_the_utmost_values_travel() -> None:
    options = Options(seed=2**64 - 1, priority=-(2**31), lookahead=0, max_tokens=1, stop="x")
    spec = spec_to_pb((1, 2**32 - 1), options)
    assert (spec.seed, spec.priority, spec.speculation.max_lookahead) == (2**64 - 1, -(2**31), 0)
    assert (spec.sampling.max_tokens, list(spec.stop_strings)) == (1, ["x"])
    assert list(spec.tokens.token_ids) == [1, 2**32 - 1]
    rich = Options(logit_bias={0: -100, 2**32 - 1: 100.0}, logprobs=0, output_prefix_ids=(0, 7))
    spec = spec_to_pb("hi", rich)
    assert dict(spec.sampling.logit_bias) == {0: -100.0, 2**32 - 1: 100.0}
    assert spec.sampling.HasField("num_logprobs")
    assert list(spec.output_prefix_ids) == [0, 7]
    unset = spec_to_pb("hi", Options())
    assert not unset.sampling.HasField("num_logprobs")
    assert not unset.HasField("seed")
    assert not unset.speculation.HasField("max_lookahead")
    assert unset.sampling.max_tokens == 0
    assert beside(Options(timeout=0.5, traceparent="00-a-b-01")) == {
        "timeout": 0.5,
        "metadata": (("traceparent", "00-a-b-01"),),
    }


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("http://127.0.0.1:7070", "must be HOST:PORT without http://"),
        ("localhost", "must be HOST:PORT"),
        ("", "must be HOST:PORT"),
        ("127.0.0.1:99999", "must be HOST:PORT"),
    ],
)
def test_an_address_is_a_host_and_a_port(address: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        Client(address)
    assert caught.value.field == "address"


@pytest.mark.parametrize("ask", [lambda c: c.generate("hi"), lambda c: c.status()])
def test_a_gateway_that_is_not_there_is_said_so(ask: Any) -> None:
    with pytest.raises(TandemError) as caught, Client("127.0.0.1:1") as client:
        ask(client)
    assert type(caught.value) is UnavailableError
    assert str(caught.value) == 'no gateway at 127.0.0.1:1; start one with "tandem up"'


def test_a_deadline_says_how_long_it_was() -> None:
    async def test(w: World) -> None:
        with pytest.raises(TimedOutError, match=r"^gave up after 0\.2 s$"):
            await w.client.generate("ab", timeout=0.2)

    in_world(test)


def test_an_answer_prints_short() -> None:
    async def test(w: World) -> None:
        w.target.script = [ending("hello")]
        answer = await w.client.generate("ab")
        told = str(answer)
        assert told.startswith("Generation('hello', LENGTH, 5 tokens, 0/0 draft tokens accepted, ")
        assert len(told) < 90

    in_world(test)
