"""What clients call: checks a request, opens a session, tells its events."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

import common
from common.errors import (
    AbandonedError,
    InternalFaultError,
    NotFoundError,
    TandemError,
    clipped,
    status_details,
)
from common.logs import fields
from common.wire import model_to_pb
from gateway.choices import events_of, gathered, open_choices
from gateway.config import GatewayConfig
from gateway.explain import explain
from gateway.relay import Relay
from gateway.spans import GatewaySpans, RequestSpans
from gateway.spec import choices_of, read_spec
from gateway.types import Event, Finished, GatewayStatus, Started
from gateway.wire import (
    event_to_pb,
    explanation_to_pb,
    gateway_status_to_pb,
    generation_to_pb,
)

log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]
ResponseT = TypeVar("ResponseT")
ABANDONED_SECONDS = 0.2
"""How long we wait until a client that reads nothing has been told so."""
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["GatewayService"].full_name

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
        # Whoever reads nothing does not read this either: it stays with gRPC, and we go on.
        patience = ABANDONED_SECONDS if isinstance(error, AbandonedError) else None
        try:
            async with asyncio.timeout(patience):
                await context.abort(error.code, clipped(str(error)), status_details(error))
        except TimeoutError:
            raise asyncio.CancelledError from None  # not logged, as nobody's fault but theirs
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
        async with self._answering("Generate", request.spec, context) as events:
            return generation_to_pb(gathered([event async for event in events]))

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
            num = max(1, spec.n)
            sessions = open_choices(
                self._relay,
                choices_of(request, num),
                self._config.max_live_requests,
                arrived_at,
                spans,
            )
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
                n=num,
                num_prefix_tokens=len(request.output_prefix),
            )
            async with contextlib.aclosing(events_of(sessions, served.tokenizer)) as events:
                async for event in events:
                    if isinstance(event, Finished) and request.explain:
                        explanation = explain(self._relay.record(sessions[event.index]))
                        event = replace(event, explanation=explanation)
                    yield event
                    if isinstance(event, Finished):
                        self._relay.close(sessions[event.index])
        finally:
            for session in sessions:
                self._relay.close(session)
            if spans is not None:
                spans.recorded(sessions[0].record())
