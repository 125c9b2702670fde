"""What clients call: checks a request, opens a session, tells its events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc, types_pb2

import common
from common.errors import (
    AbandonedError,
    InternalFaultError,
    InvalidRequestError,
    NotFoundError,
    NotServedError,
    TandemError,
    status_details,
)
from common.logs import fields
from common.types import Rule, SamplingParams, Tokens
from common.wire import model_to_pb, rule_from_pb, sampling_from_pb
from gateway.config import GatewayConfig
from gateway.explain import explain
from gateway.fit import Served
from gateway.relay import Relay
from gateway.spans import GatewaySpans, RequestSpans
from gateway.types import (
    Delta,
    Event,
    Finished,
    GatewayStatus,
    Generation,
    GenerationRequest,
    Started,
)
from gateway.wire import (
    event_to_pb,
    explanation_to_pb,
    gateway_status_to_pb,
    generation_to_pb,
)

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
ResponseT = TypeVar("ResponseT")
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GatewayService"].full_name
ROLES = ("system", "user", "assistant")

add_to_server = gateway_pb2_grpc.add_GatewayServiceServicer_to_server


def _told(
    method: Callable[[Any, Any, Context], Awaitable[ResponseT]],
) -> Callable[[Any, Any, Context], Awaitable[ResponseT]]:
    """Ends a call with the status of its exception: the one place where errors go out."""

    @functools.wraps(method)
    async def answer(self: Any, request: Any, context: Context) -> ResponseT:
        try:
            return await method(self, request, context)
        except TandemError as told:
            error = told
        except Exception:
            request_id = getattr(getattr(request, "spec", None), "request_id", None)
            log.exception("fault in %s", method.__name__, extra=fields(request_id=request_id))
            error = InternalFaultError("the gateway has failed, see its log")
        await context.abort(error.code, str(error), status_details(error))
        raise AssertionError("abort raises")

    return answer


class GatewayServicer(gateway_pb2_grpc.GatewayServiceServicer):
    """GatewayService over a relay."""

    def __init__(
        self, config: GatewayConfig, relay: Relay, spans: GatewaySpans | None = None
    ) -> None:
        self._config = config
        self._relay = relay
        self._spans = spans  # None: nothing is traced

    @_told
    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> pb.GenerateResponse:
        """Answer once."""
        started: Started | None = None
        deltas: list[Delta] = []
        async with self._answering("Generate", request.spec, context) as events:
            async for event in events:
                if isinstance(event, Started):
                    started = event
                elif isinstance(event, Delta):
                    deltas.append(event)
                elif isinstance(event, Finished):
                    assert started is not None
                    return generation_to_pb(_gather(started, deltas, event))
        raise InternalFaultError("the text has no end")

    @_told
    async def StreamGenerate(  # type: ignore[override]  # noqa: N802
        self, request: pb.StreamGenerateRequest, context: Context
    ) -> None:
        """Answer token by token; writes, so that a client that does not read is noticed."""
        async with self._answering("StreamGenerate", request.spec, context) as events:
            async for event in events:
                try:
                    async with asyncio.timeout(self._config.client_stall_seconds):
                        await context.write(event_to_pb(event))
                except TimeoutError:
                    raise AbandonedError(
                        f"the client has read nothing for {self._config.client_stall_seconds} s"
                    ) from None

    @_told
    async def GetStatus(  # noqa: N802
        self, request: pb.GetStatusRequest, context: Context
    ) -> pb.GetStatusResponse:
        """Tell of the gateway and its peers."""
        status = GatewayStatus(common.__version__, self._relay.num_live(), self._relay.status())
        return gateway_status_to_pb(status)

    @_told
    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: Context
    ) -> pb.ListModelsResponse:
        """List what can be asked for."""
        return pb.ListModelsResponse(models=map(model_to_pb, self._relay.models()))

    @_told
    async def Explain(  # noqa: N802
        self, request: pb.ExplainRequest, context: Context
    ) -> pb.ExplainResponse:
        """Say what bounded one of the last requests."""
        record = self._relay.journal.get(request.request_id)
        if record is None:
            raise NotFoundError(
                f'no finished request "{request.request_id}" is remembered', field="request_id"
            )
        return pb.ExplainResponse(explanation=explanation_to_pb(explain(record)))

    @contextlib.asynccontextmanager
    async def _answering(
        self, method: str, spec: pb.GenerationSpec, context: Context
    ) -> AsyncIterator[AsyncGenerator[Event, None]]:
        """The events of a request; its spans, if it is traced, end with what is done inside."""
        arrived_at, timeout_seconds = time.monotonic(), context.time_remaining()
        spec.request_id = spec.request_id or uuid.uuid4().hex
        spans = self._spans and self._spans.begin(
            f"{SERVICE_NAME}/{method}",
            spec.request_id,
            context.invocation_metadata() or (),
            arrived_at=arrived_at,
            timeout_seconds=timeout_seconds,
        )
        if spans:
            spans.asked(chat=spec.HasField("chat"), model=spec.model)
        error: BaseException | None = None
        try:
            async with contextlib.aclosing(
                self._events(spec, arrived_at, timeout_seconds, spans or None)
            ) as events:
                yield events
        except BaseException as caught:
            error = caught
            raise
        finally:
            if spans:
                spans.end(error)

    async def _events(
        self,
        spec: pb.GenerationSpec,
        arrived_at: float,
        timeout_seconds: float | None,
        spans: RequestSpans | None,
    ) -> AsyncGenerator[Event, None]:
        try:
            served = self._relay.served(spec.model)
            request = read_spec(
                spec,
                served,
                self._config,
                self._relay.max_lookahead,
                timeout_seconds=timeout_seconds,
            )
            if spans is not None:
                spans.accepted(request)
            session = self._relay.open(request, arrived_at, spans)
        except TandemError:
            self._relay.refused()
            raise
        try:
            yield Started(
                request_id=request.request_id,
                seed=request.sampling.seed,
                rule=request.sampling.rule,
                model=served.model.name,
                weights_fingerprint=served.model.weights_fingerprint,
                num_prompt_tokens=len(request.prompt),
                max_lookahead=request.lookahead,
            )
            async with contextlib.aclosing(session.events(served.tokenizer)) as events:
                async for event in events:
                    if isinstance(event, Finished) and request.explain:
                        explanation = explain(self._relay.record(session))
                        event = replace(event, explanation=explanation)
                    yield event
        finally:
            self._relay.close(session)
            if spans is not None:
                spans.recorded(session.record())


def _gather(started: Started, deltas: list[Delta], finished: Finished) -> Generation:
    return Generation(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        origins=tuple(origin for delta in deltas for origin in delta.origins),
        started=started,
        finished=finished,
    )


def read_spec(
    spec: pb.GenerationSpec,
    served: Served,
    config: GatewayConfig,
    max_lookahead: int,
    timeout_seconds: float | None = None,
) -> GenerationRequest:
    """A request out of its message.

    Raises `InvalidRequestError` or `NotServedError` naming the field as the message does.
    """
    _refuse_unserved(spec)
    prompt = _read_prompt(spec, served)
    model = served.model
    room = model.context_len - len(prompt)
    if room < 1:
        raise InvalidRequestError(
            f"is {len(prompt)} tokens, must be fewer than the context's {model.context_len}",
            field="input",
        )
    for index, string in enumerate(spec.stop_strings):
        if not string:
            raise InvalidRequestError("is empty", field=f"stop_strings[{index}]")
    _check_ids(spec.sampling.stop_token_ids, "sampling.stop_token_ids", model.vocab_size)
    options = spec.speculation
    lookahead = max_lookahead
    if options.HasField("max_lookahead"):
        lookahead = min(lookahead, options.max_lookahead)
    return GenerationRequest(
        request_id=spec.request_id or uuid.uuid4().hex,
        model=model,
        prompt=prompt,
        sampling=_read_sampling(spec, min(room, config.default_max_tokens), room),
        stop_strings=tuple(spec.stop_strings),
        lookahead=0 if options.disabled else lookahead,
        priority=spec.priority,
        explain=spec.explain,
        timeout_seconds=timeout_seconds,
    )


def _refuse_unserved(spec: pb.GenerationSpec) -> None:
    sampling = spec.sampling
    asked = {
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty")
        and sampling.repetition_penalty != 1,
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.min_tokens": sampling.min_tokens != 0,
        "sampling.num_logprobs": sampling.HasField("num_logprobs"),
        "n": spec.n > 1,
        "output_prefix_ids": bool(spec.output_prefix_ids),
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise NotServedError("is not served yet; leave it unset", field=field)
    if sampling.seed:
        raise InvalidRequestError("must be left unset; set seed instead", field="sampling.seed")
    if sampling.rule:
        raise InvalidRequestError(
            "must be left unset; set speculation.rule instead", field="sampling.rule"
        )


def _read_prompt(spec: pb.GenerationSpec, served: Served) -> Tokens:
    match spec.WhichOneof("input"):
        case "text":
            field, prompt = "text", served.tokenizer.encode(spec.text)
        case "chat":
            field = "chat.messages"
            for index, message in enumerate(spec.chat.messages):
                if message.role not in ROLES:
                    raise InvalidRequestError(
                        f'is "{message.role}", must be one of {", ".join(ROLES)}',
                        field=f"chat.messages[{index}].role",
                    )
            turns = [{"role": m.role, "content": m.content} for m in spec.chat.messages]
            prompt = served.tokenizer.render_chat(turns) if turns else ()
        case "tokens":
            field, prompt = "tokens.token_ids", tuple(spec.tokens.token_ids)
            _check_ids(prompt, field, served.model.vocab_size)
        case _:
            raise InvalidRequestError("is missing; set text, chat or tokens", field="input")
    if not prompt:
        raise InvalidRequestError("is empty", field=field)
    return prompt


def _check_ids(token_ids: Iterable[int], field: str, vocab_size: int) -> None:
    for index, token_id in enumerate(token_ids):
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"is {token_id}, must be below the vocabulary size of {vocab_size}",
                field=f"{field}[{index}]",
            )


def _read_sampling(spec: pb.GenerationSpec, default_max_tokens: int, room: int) -> SamplingParams:
    rule = spec.speculation.rule
    if rule not in types_pb2.Rule.values():
        raise InvalidRequestError(f"is {rule}, which is no rule", field="speculation.rule")
    return sampling_from_pb(
        spec.sampling,
        max_tokens=min(spec.sampling.max_tokens or default_max_tokens, room),
        seed=spec.seed if spec.HasField("seed") else secrets.randbits(64),
        rule=rule_from_pb(rule, Rule.COUPLED),
    )
