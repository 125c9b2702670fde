"""A typed client of the gateway, sync and async.

    with Client("127.0.0.1:7070") as client:
        answer = client.generate([Message("user", "Why is the sky blue?")], max_tokens=64)
        print(answer.text, answer.finished.speculation.accepted)
        for event in client.stream("Once upon a time", temperature=0.7, seed=1):
            if isinstance(event, Delta):
                print(event.text, end="")

Every failure is a `TandemError` of `common.errors`. A stream that breaks can be taken up again
with the seed and the ids that have come, see "Resuming" in `gateway/README.md`.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Generator
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

from common.config import check_address
from common.errors import (
    TandemError,
    TimedOutError,
    UnavailableError,
    error_from_rpc,
    told_by_service,
)
from common.service import CHANNEL_OPTIONS
from common.types import ModelInfo, Rule
from common.wire import model_from_pb
from gateway.asking import Options, Prompt, beside, spec_to_pb
from gateway.types import (
    Choice,
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
    "Choice",
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

_RETRIES = {
    # Sent in the very moment in which a gateway sends its clients elsewhere: gRPC's server drops
    # such a request as CANCELLED, unread. One that has begun to answer is never sent again.
    "maxAttempts": 4,
    "initialBackoff": "0.05s",
    "maxBackoff": "0.5s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["CANCELLED"],
}
CLIENT_OPTIONS: list[tuple[str, Any]] = [
    *CHANNEL_OPTIONS,
    (
        "grpc.service_config",
        json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": _RETRIES}]}),
    ),
]
"""For channels to a gateway, or to several by one name."""

_NO_CONNECTION = re.compile("failed to connect|errors resolving|connections to all backends")
_BROKEN_CONNECTION = re.compile("Socket closed|Connection reset|GOAWAY")


def _told(error: grpc.RpcError, address: str, timeout: float | None = None) -> TandemError:
    """The exception behind a failed call, in the words of someone who asked this gateway."""
    told = error_from_rpc(error)
    if isinstance(told, TimedOutError) and timeout is not None:
        return TimedOutError(f"gave up after {timeout:g} s")
    if not isinstance(told, UnavailableError) or told_by_service(error):
        return told  # a gateway may quote what its connection with a target said
    if _NO_CONNECTION.search(told.message):
        return UnavailableError(f'no gateway at {address}; start one with "tandem up"')
    if _BROKEN_CONNECTION.search(told.message):
        return UnavailableError(f"the gateway at {address} has gone")
    return told


class Client:
    """A sync client; a context manager."""

    def __init__(self, address: str) -> None:
        self._address = check_address(address, "address")
        self._channel = grpc.insecure_channel(address, CLIENT_OPTIONS)
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
        """A whole text, or several; overrides are fields of `Options`."""
        options = replace(options or Options(), **overrides)
        request = pb.GenerateRequest(spec=spec_to_pb(prompt, options))
        try:
            return generation_from_pb(self._stub.Generate(request, **beside(options)))
        except grpc.RpcError as error:
            raise _told(error, self._address, options.timeout) from None

    def stream(
        self, prompt: Prompt, options: Options | None = None, **overrides: Any
    ) -> Generator[Event, None, None]:
        """Started, then deltas and progress, and Finished for each choice; closing it cancels."""
        options = replace(options or Options(), **overrides)
        request = pb.StreamGenerateRequest(spec=spec_to_pb(prompt, options))
        call = self._stub.StreamGenerate(request, **beside(options))
        try:
            for response in call:
                event = event_from_pb(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise _told(error, self._address, options.timeout) from None
        finally:
            call.cancel()

    def status(self, timeout: float | None = None) -> GatewayStatus:
        """The gateway and its peers; the timeout is in seconds."""
        try:
            response = self._stub.GetStatus(pb.GetStatusRequest(), timeout=timeout)
        except grpc.RpcError as error:
            raise _told(error, self._address, timeout) from None
        return gateway_status_from_pb(response)

    def explain(self, request_id: str) -> Explanation:
        """What bounded one of the gateway's last requests."""
        try:
            response = self._stub.Explain(pb.ExplainRequest(request_id=request_id))
        except grpc.RpcError as error:
            raise _told(error, self._address) from None
        return explanation_from_pb(response.explanation)

    def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for."""
        try:
            response = self._stub.ListModels(pb.ListModelsRequest())
        except grpc.RpcError as error:
            raise _told(error, self._address) from None
        return tuple(map(model_from_pb, response.models))


class AsyncClient:
    """An async client; an async context manager. Belongs to the loop that it is made in."""

    def __init__(self, address: str) -> None:
        self._address = check_address(address, "address")
        self._channel = grpc.aio.insecure_channel(address, CLIENT_OPTIONS)
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
        """A whole text, or several; overrides are fields of `Options`."""
        options = replace(options or Options(), **overrides)
        request = pb.GenerateRequest(spec=spec_to_pb(prompt, options))
        try:
            return generation_from_pb(await self._stub.Generate(request, **beside(options)))
        except grpc.RpcError as error:
            raise _told(error, self._address, options.timeout) from None

    async def stream(
        self, prompt: Prompt, options: Options | None = None, **overrides: Any
    ) -> AsyncGenerator[Event, None]:
        """Started, then deltas and progress, and Finished for each choice; closing it cancels."""
        options = replace(options or Options(), **overrides)
        request = pb.StreamGenerateRequest(spec=spec_to_pb(prompt, options))
        call = self._stub.StreamGenerate(request, **beside(options))
        try:
            async for response in call:
                event = event_from_pb(response)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise _told(error, self._address, options.timeout) from None
        finally:
            call.cancel()

    async def status(self) -> GatewayStatus:
        """The gateway and its peers."""
        try:
            response = await self._stub.GetStatus(pb.GetStatusRequest())
        except grpc.RpcError as error:
            raise _told(error, self._address) from None
        return gateway_status_from_pb(response)

    async def explain(self, request_id: str) -> Explanation:
        """What bounded one of the gateway's last requests."""
        try:
            response = await self._stub.Explain(pb.ExplainRequest(request_id=request_id))
        except grpc.RpcError as error:
            raise _told(error, self._address) from None
        return explanation_from_pb(response.explanation)

    async def models(self) -> tuple[ModelInfo, ...]:
        """What can be asked for."""
        try:
            response = await self._stub.ListModels(pb.ListModelsRequest())
        except grpc.RpcError as error:
            raise _told(error, self._address) from None
        return tuple(map(model_from_pb, response.models))
