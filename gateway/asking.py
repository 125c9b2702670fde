"""What a client may ask for: checked here, so that a wrong value is named before it travels."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, cast

from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import types_pb2

from common.errors import InvalidRequestError
from common.types import Rule, Tokens
from common.wire import rule_to_pb
from gateway.types import Message

UINT32 = (0, 2**32 - 1)
UINT64 = (0, 2**64 - 1)
INT32 = (-(2**31), 2**31 - 1)

Prompt = str | Sequence[Message] | Sequence[Mapping[str, str]] | Sequence[int]
"""Text to continue, a conversation to answer, or token ids to continue."""


@dataclass(frozen=True, slots=True)
class Options:
    """How to generate; None leaves the choice to the gateway."""

    model: str = ""  # empty: the only one
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0
    stop: str | Sequence[str] = ()  # the text ends before the first of them
    stop_token_ids: Tokens = ()
    seed: int | None = None  # reproduces a text under the coupled rule
    ignore_eos: bool = False
    rule: Rule | str | None = None
    lookahead: int | None = None  # how far drafts may be ahead
    speculate: bool = True
    priority: int = 0
    request_id: str = ""
    explain: bool = False  # the last event then says what bounded the request
    repetition_penalty: float = 1.0  # divides the logits of tokens seen; 1: off
    presence_penalty: float = 0.0  # off the logits of tokens generated
    frequency_penalty: float = 0.0  # the same, for every time that one was generated
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added, by token id
    min_tokens: int = 0  # the text does not end before, unless by a stop string
    logprobs: int | None = None  # of each token and of so many likeliest; None: none
    n: int = 1  # choices; each has a seed of its own
    output_prefix_ids: Sequence[int] = ()  # output that is here already: resumes after it
    cache_salt: str = ""  # only requests with the same salt share cached prefixes
    timeout: float | None = None  # seconds
    traceparent: str = ""  # W3C trace context of the caller; its sampled flag decides


def spec_to_pb(prompt: Prompt, options: Options) -> pb.GenerationSpec:
    """The message that asks for it; raises `InvalidRequestError` naming the field."""
    o = options
    spec = pb.GenerationSpec(
        model=_text("model", o.model),
        request_id=_text("request_id", o.request_id),
        stop_strings=_texts("stop_strings", o.stop),
        seed=None if o.seed is None else _whole("seed", o.seed, *UINT64),
        priority=_whole("priority", o.priority, *INT32),
        explain=_truth("explain", o.explain),
        speculation=pb.SpeculationOptions(
            disabled=not _truth("speculate", o.speculate),
            rule=_rule(o.rule),
            max_lookahead=None
            if o.lookahead is None
            else _whole("speculation.max_lookahead", o.lookahead, *UINT32),
        ),
        n=_whole("n", o.n, 1, UINT32[1]),
        output_prefix_ids=_ids("output_prefix_ids", o.output_prefix_ids),
        cache_salt=_text("cache_salt", o.cache_salt),
    )
    _put_sampling(spec.sampling, o)
    _put_prompt(spec, prompt)
    return spec


def beside(options: Options) -> dict[str, Any]:
    """What goes beside the message: deadline and metadata."""
    timeout, parent = options.timeout, _text("traceparent", options.traceparent)
    if timeout is not None and not 0 < (timeout := _number("timeout", timeout)) <= 1e9:
        raise InvalidRequestError(f"is {timeout:g}, must be above 0 seconds", field="timeout")
    if not (parent.isascii() and parent.isprintable()):
        raise InvalidRequestError(f"is {parent!r}, must be a W3C traceparent", field="traceparent")
    return {"timeout": timeout, "metadata": (("traceparent", parent),) if parent else None}


def _put_sampling(sampling: types_pb2.SamplingParams, o: Options) -> None:
    for name in (
        "temperature",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
    ):
        setattr(sampling, name, _number(f"sampling.{name}", getattr(o, name)))
    sampling.top_k = _whole("sampling.top_k", o.top_k, *UINT32)
    sampling.min_tokens = _whole("sampling.min_tokens", o.min_tokens, *UINT32)
    if o.max_tokens is not None:
        sampling.max_tokens = _whole("sampling.max_tokens", o.max_tokens, 1, UINT32[1])
    if o.logprobs is not None:
        sampling.num_logprobs = _whole("sampling.num_logprobs", o.logprobs, *UINT32)
    sampling.stop_token_ids.extend(_ids("sampling.stop_token_ids", o.stop_token_ids))
    sampling.ignore_eos = _truth("sampling.ignore_eos", o.ignore_eos)
    if not isinstance(o.logit_bias, Mapping):
        raise InvalidRequestError(
            f"is {o.logit_bias!r}, must map token ids to numbers", field="sampling.logit_bias"
        )
    for token_id, bias in o.logit_bias.items():
        entry = f"sampling.logit_bias[{token_id}]"
        sampling.logit_bias[_whole(entry, token_id, *UINT32)] = _number(entry, bias)


def _put_prompt(spec: pb.GenerationSpec, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        spec.text = _text("text", prompt)
        return
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes | bytearray | memoryview):
        if prompt and all(isinstance(item, Message | Mapping) for item in prompt):
            turns = cast("Sequence[Message | Mapping[str, str]]", prompt)
            spec.chat.messages.extend(_turn(i, turn) for i, turn in enumerate(turns))
            return
        if not any(isinstance(item, str | bytes | Message | Mapping) for item in prompt):
            spec.tokens.token_ids.extend(_ids("tokens.token_ids", prompt))
            return
    raise InvalidRequestError("must be a text, a list of messages or of token ids", field="input")


def _turn(index: int, turn: Message | Mapping[str, str]) -> pb.ChatMessage:
    field = f"chat.messages[{index}]"
    if isinstance(turn, Mapping):
        if set(turn) != {"role", "content"}:
            raise InvalidRequestError(
                f"has {', '.join(map(str, turn)) or 'nothing'}, must have role and content",
                field=field,
            )
        turn = Message(turn["role"], turn["content"])
    role, content = _text(f"{field}.role", turn.role), _text(f"{field}.content", turn.content)
    return pb.ChatMessage(role=role, content=content)


def _rule(rule: Rule | str | None) -> types_pb2.Rule.ValueType:
    if rule is None:
        return types_pb2.RULE_UNSPECIFIED
    if isinstance(rule, str) and rule.upper() in Rule.__members__:
        rule = Rule[rule.upper()]
    if not isinstance(rule, Rule):
        names = ", ".join(name.lower() for name in Rule.__members__)
        raise InvalidRequestError(f"is {rule!r}, must be one of {names}", field="speculation.rule")
    return rule_to_pb(rule)


def _whole(field: str, value: Any, least: int, most: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise InvalidRequestError(
            f"is {value!r}, must be a whole number from {least} to {most}", field=field
        )
    return number


def _number(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidRequestError(f"is {value!r}, must be a number", field=field)
    try:
        return float(value)
    except OverflowError:
        raise InvalidRequestError("is too large", field=field) from None


def _truth(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"is {value!r}, must be True or False", field=field)
    return value


def _text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequestError(f"is {value!r}, must be a string", field=field)
    try:
        value.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, or a byte of another encoding
        raise InvalidRequestError("has what is not Unicode text", field=field) from None
    return value


def _texts(field: str, values: Any) -> list[str]:
    if isinstance(values, str):
        values = [values]
    if not isinstance(values, Sequence) or isinstance(values, bytes | bytearray):
        raise InvalidRequestError(f"is {values!r}, must be a string or a list of them", field=field)
    return [_text(f"{field}[{i}]", value) for i, value in enumerate(values)]


def _ids(field: str, values: Any) -> list[int]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes | bytearray):
        raise InvalidRequestError(f"is {values!r}, must be a list of token ids", field=field)
    return [_whole(f"{field}[{i}]", value, *UINT32) for i, value in enumerate(values)]
