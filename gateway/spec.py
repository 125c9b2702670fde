"""A request out of its message: every field is checked, and a wrong one is named."""

from __future__ import annotations

import hashlib
import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import types_pb2

from common.errors import InvalidRequestError
from common.seeds import hash_seed
from common.types import ModelInfo, Rule, SamplingParams, Tokens
from common.wire import rule_from_pb, sampling_from_pb
from gateway.config import GatewayConfig
from gateway.fit import Served
from gateway.text import stopped_at
from gateway.types import MAX_CHOICES, GenerationRequest

ROLES = ("system", "user", "assistant")
MAX_ID_LEN = 256
MAX_SALT_LEN = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_LEN = 1024
MAX_TOKEN_LEN = 256
"""Characters; no prompt has more for each of its tokens, so a longer text isn't tokenized."""


def read_spec(
    spec: pb.GenerationSpec,
    served: Served,
    config: GatewayConfig,
    max_lookahead: int,
    timeout_seconds: float | None = None,
) -> GenerationRequest:
    """A request out of its message, for the first choice.

    Raises `InvalidRequestError` naming the field as the message does.
    """
    _check_names(spec)
    _check_stop_strings(spec.stop_strings)
    _check_num_choices(spec, config)
    model, prompt = served.model, _read_prompt(spec, served)
    room = model.context_len - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            f"is {len(prompt)} tokens, must be fewer than the context's {model.context_len}",
            field="input",
        )
    sampling = _read_sampling(spec, model, min(room, config.default_max_tokens), room)
    prefix = tuple(spec.output_prefix_ids)
    if prefix:
        _check_prefix(prefix, prompt, sampling, spec, served)
    options = spec.speculation
    lookahead = max_lookahead
    if options.HasField("max_lookahead"):
        lookahead = min(lookahead, options.max_lookahead)
    return GenerationRequest(
        request_id=spec.request_id or uuid.uuid4().hex,
        model=model,
        prompt=prompt,
        sampling=sampling,
        stop_strings=tuple(spec.stop_strings),
        lookahead=0 if options.disabled else lookahead,
        priority=spec.priority,
        explain=spec.explain,
        timeout_seconds=timeout_seconds,
        output_prefix=prefix,
        cache_scope=cache_scope(spec.cache_salt),
    )


def choices_of(request: GenerationRequest, num: int) -> tuple[GenerationRequest, ...]:
    """The requests of all choices: each has a seed and, after the first, an id of its own."""
    seed, request_id = request.sampling.seed, request.request_id
    further = (
        replace(
            request,
            request_id=f"{request_id}/{index}",
            sampling=replace(request.sampling, seed=hash_seed(seed, index)),
            index=index,
        )
        for index in range(1, num)
    )
    return (request, *further)


def cache_scope(salt: str) -> str:
    """Who shares cached prefixes: those of the same salt, and all without one.

    Once callers are authenticated, who they are is mixed in here too.
    """
    return hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else ""


def _check_names(spec: pb.GenerationSpec) -> None:
    if len(spec.request_id) > MAX_ID_LEN or not spec.request_id.isprintable():
        raise InvalidRequestError(
            f"must be at most {MAX_ID_LEN} printable characters", field="request_id"
        )
    if len(spec.cache_salt) > MAX_SALT_LEN:
        raise InvalidRequestError(
            f"is {len(spec.cache_salt)} characters, must be at most {MAX_SALT_LEN}",
            field="cache_salt",
        )


def _check_stop_strings(strings: Sequence[str]) -> None:
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(
            f"has {len(strings)}, must have at most {MAX_STOP_STRINGS}", field="stop_strings"
        )
    for index, string in enumerate(strings):
        field = f"stop_strings[{index}]"
        if not string:
            raise InvalidRequestError("is empty", field=field)
        if len(string) > MAX_STOP_STRING_LEN:
            raise InvalidRequestError(
                f"is {len(string)} characters, must be at most {MAX_STOP_STRING_LEN}", field=field
            )


def _check_num_choices(spec: pb.GenerationSpec, config: GatewayConfig) -> None:
    most = min(MAX_CHOICES, config.max_live_requests)
    if spec.n > most:
        raise InvalidRequestError(f"is {spec.n}, must be 1 to {most}", field="n")
    if spec.n > 1 and spec.output_prefix_ids:
        raise InvalidRequestError(
            "resumes one choice; leave n unset, and set seed to that choice's own",
            field="output_prefix_ids",
        )


def _read_prompt(spec: pb.GenerationSpec, served: Served) -> Tokens:
    most = served.model.context_len * MAX_TOKEN_LEN
    match spec.WhichOneof("input"):
        case "text":
            field = "text"
            _check_text_len(len(spec.text), most, served.model)
            prompt = served.tokenizer.encode(spec.text)
        case "chat":
            field = "chat.messages"
            for index, message in enumerate(spec.chat.messages):
                if message.role not in ROLES:
                    raise InvalidRequestError(
                        f'is "{message.role}", must be one of {", ".join(ROLES)}',
                        field=f"chat.messages[{index}].role",
                    )
            _check_text_len(sum(len(m.content) for m in spec.chat.messages), most, served.model)
            turns = [{"role": m.role, "content": m.content} for m in spec.chat.messages]
            prompt = served.tokenizer.render_chat(turns) if turns else ()
        case "tokens":
            field, prompt = "tokens.token_ids", tuple(spec.tokens.token_ids)
            _check_ids(prompt, field, served.model)
        case _:
            raise InvalidRequestError("is missing; set text, chat or tokens", field="input")
    if not prompt:
        raise InvalidRequestError("is empty", field=field)
    return prompt


def _check_text_len(num: int, most: int, model: ModelInfo) -> None:
    if num > most:
        raise InvalidRequestError(
            f"is {num} characters, more than the context's {model.context_len} tokens can hold",
            field="input",
        )


def _check_ids(token_ids: Iterable[int], field: str, model: ModelInfo) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"is {token_id}, must be below the vocabulary size of {model.vocab_size}",
                field=f"{field}[{index}]",
            )


def _read_sampling(
    spec: pb.GenerationSpec, model: ModelInfo, default_max_tokens: int, room: int
) -> SamplingParams:
    sampling, rule = spec.sampling, spec.speculation.rule
    if sampling.seed:
        raise InvalidRequestError("must be left unset; set seed instead", field="sampling.seed")
    if sampling.rule:
        raise InvalidRequestError(
            "must be left unset; set speculation.rule instead", field="sampling.rule"
        )
    if rule not in types_pb2.Rule.values():
        raise InvalidRequestError(f"is {rule}, which is no rule", field="speculation.rule")
    _check_ids(sampling.stop_token_ids, "sampling.stop_token_ids", model)
    for token_id in sorted(sampling.logit_bias):
        if token_id >= model.vocab_size:
            raise InvalidRequestError(
                f"biases an id that must be below the vocabulary size of {model.vocab_size}",
                field=f"sampling.logit_bias[{token_id}]",
            )
    return sampling_from_pb(
        sampling,
        max_tokens=min(sampling.max_tokens or default_max_tokens, room),
        seed=spec.seed if spec.HasField("seed") else secrets.randbits(64),
        rule=rule_from_pb(rule, Rule.COUPLED),
    )


def _check_prefix(
    prefix: Tokens,
    prompt: Tokens,
    sampling: SamplingParams,
    spec: pb.GenerationSpec,
    served: Served,
) -> None:
    field, model = "output_prefix_ids", served.model
    _check_ids(prefix, field, model)
    if len(prompt) + len(prefix) >= model.context_len:
        raise InvalidRequestError(
            f"is {len(prefix)} tokens after a prompt of {len(prompt)},"
            f" must leave room in the context's {model.context_len}",
            field=field,
        )
    if len(prefix) >= sampling.max_tokens:
        raise InvalidRequestError(
            f"is {len(prefix)} tokens, must be fewer than max_tokens, {sampling.max_tokens}",
            field=field,
        )
    endings = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else model.eos_token_ids)}
    for index, token_id in enumerate(prefix):
        if token_id in endings:
            raise InvalidRequestError(
                f"is {token_id}, which ends the text: there is nothing to resume",
                field=f"{field}[{index}]",
            )
    stopped = stopped_at(served.tokenizer, prompt, prefix, spec.stop_strings)
    if stopped is not None:
        raise InvalidRequestError(
            "completes a stop string: there is nothing to resume", field=f"{field}[{stopped}]"
        )
