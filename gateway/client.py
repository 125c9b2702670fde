"""A typed client of the gateway, sync and async.

    with Client("127.0.0.1:7070") as client:
        answer = client.generate([Message("user", "Why is the sky blue?")], max_tokens=64)
        print(answer.text, answer.finished.speculation.accepted)
        for event in client.stream("Once upon a time", temperature=0.7, seed=1):
            if isinstance(event, Delta):
                print(event.text, end="")

Every failure is a `TandemError` of `common.errors`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self, cast

import grpc
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc, types_pb2

from common.errors import error_from_rpc
from common.service import CHANNEL_OPTIONS
from common.types import ModelInfo, Rule, Tokens
from common.wire import model_from_pb, rule_to_pb
from gateway.types import (
    Delta,
    Event,
    Explanation,
    Finished,
    GatewayStatus,
    Generation,
    Message,
    Progress,
    Started,
)
from gateway.wire import (
    event_from_pb,
    explanation_from_pb,
    gateway_status_from_pb,
    generation_from_pb,
)

__all__ = [
    "AsyncClient",
    "Client",
    "Delta",
    "Event",
    "Explanation",
    "Finished",
    "Generation",
    "Message",
    "Options",
    "Progress",
    "Rule",
    "Started",
]

Prompt = str | Sequence[Message] | Sequence[int]
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
    stop: Sequence[str] = ()  # the text ends before the first of them
    stop_token_ids: Tokens = ()
    seed: int | None = None  # reproduces a text under the coupled rule
    ignore_eos: bool = False
    rule: Rule | None = None
    lookahead: int | None = None  # how far drafts may be ahead
    speculate: bool = True
    priority: int = 0
    request_id: str = ""
    explain: bool = False  # the last event then says what bounded the request
    timeout: float | None = None  # seconds
    traceparent: str = ""  # W3C trace context of the caller; its sampled flag decides


def _spec(prompt: Prompt, options: Options) -> pb.GenerationSpec:
    spec = pb.GenerationSpec(
        model=options.model,
        request_id=options.request_id,
        stop_strings=[options.stop] if isinstance(options.stop, str) else options.stop,
        seed=options.seed,
        priority=options.priority,
        explain=options.explain,
        speculation=pb.SpeculationOptions(
            disabled=not options.speculate,
            rule=rule_to_pb(options.rule) if options.rule else types_pb2.RULE_UNSPECIFIED,
            max_lookahead=options.lookahead,
        ),
    )
    sampling = spec.sampling
    sampling.temperature = options.temperature
    sampling.top_k = options.top_k
    sampling.top_p = options.top_p
    sampling.min_p = options.min_p
    sampling.max_tokens = options.max_tokens or 0
    sampling.stop_token_ids.extend(options.stop_token_ids)
    sampling.ignore_eos = options.ignore_eos
    if isinstance(prompt, str):
        spec.text = prompt
    elif prompt and isinstance(prompt[0], Message):
        turns = cast("Sequence[Message]", prompt)
        spec.chat.messages.extend(pb.ChatMessage(role=m.role, content=m.content) for m in turns)
    else:
        spec.tokens.token_ids.extend(cast("Sequence[int]", prompt))
    return spec


def _call(options: Options) -> dict[str, Any]:
    """What goes beside the message."""
    metadata = (("traceparent", options.traceparent),) if options.traceparent else None
    return {"timeout": options.timeout, "metadata": metadata}


class Client:
    """A sync client; a context manager."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Hang up; calls under way are cancelled."""
        self._channel.close()

    def generate(
        self, prompt: Prompt, options: Options | None = None, **overrides: Any
    ) -> Generation:
        """A whole text; overrides are fields of `Options`."""
        options = replace(options or Options(), **overrides)
        request = pb.GenerateRequest(spec=_spec(prompt, options))
        try:
            return generation_from_pb(self._stub.Generate(request, **_call(options)))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def stream(
        self, prompt: Prompt, options: Options | None = None, **overrides: Any
    ) -> Generator[Event, None, None]:
        """Started, then deltas and progress, then Finished; closing it cancels the request."""
        options = replace(options or Options(), **overrides)
        request = pb.StreamGenerateRequest(spec=_spec(prompt, options))
        call = self._stub.StreamGenerate(request, **_call(options))
        try:
            for response in call:
                event = event_from_pb(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()

    def status(self) -> GatewayStatus:
        """The gateway and its peers."""
        try:
            return gateway_status_from_pb(self._stub.GetStatus(pb.GetStatusRequest()))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    def explain(self, request_id: str) -> Explanation:
        """What bounded one of the gateway's last requests."""
        try:
            response = self._stub.Explain(pb.ExplainRequest(request_id=request_id))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return explanation_from_pb(response.explanation)

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for."""
        try:
            response = self._stub.ListModels(pb.ListModelsRequest())
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return tuple(map(model_from_pb, response.models))


class AsyncClient:
    """An async client; an async context manager. Belongs to the loop that it is made in."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.aio.insecure_channel(address, CHANNEL_OPTIONS)
        self._stub = gateway_pb2_grpc.GatewayServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Hang up; calls under way are cancelled."""
        await self._channel.close()

    async def generate(
        self, prompt: Prompt, options: Options | None = None, **overrides: Any
    ) -> Generation:
        """A whole text; overrides are fields of `Options`."""
        options = replace(options or Options(), **overrides)
        request = pb.GenerateRequest(spec=_spec(prompt, options))
        try:
            return generation_from_pb(await self._stub.Generate(request, **_call(options)))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def stream(
        self, prompt: Prompt, options: Options | None = None, **overrides: Any
    ) -> AsyncGenerator[Event, None]:
        """Started, then deltas and progress, then Finished; closing it cancels the request."""
        options = replace(options or Options(), **overrides)
        request = pb.StreamGenerateRequest(spec=_spec(prompt, options))
        call = self._stub.StreamGenerate(request, **_call(options))
        try:
            async for response in call:
                event = event_from_pb(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        finally:
            call.cancel()

    async def status(self) -> GatewayStatus:
        """The gateway and its peers."""
        try:
            return gateway_status_from_pb(await self._stub.GetStatus(pb.GetStatusRequest()))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None

    async def explain(self, request_id: str) -> Explanation:
        """What bounded one of the gateway's last requests."""
        try:
            response = await self._stub.Explain(pb.ExplainRequest(request_id=request_id))
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return explanation_from_pb(response.explanation)

    async def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for."""
        try:
            response = await self._stub.ListModels(pb.ListModelsRequest())
        except grpc.RpcError as error:
            raise error_from_rpc(error) from None
        return tuple(map(model_from_pb, response.models))
