"""A gateway that stops sends its clients to another one, over the channels that they keep."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import gateway_pb2 as pb
from tandem.v1 import gateway_pb2_grpc

from common.types import FinishReason
from gateway.asking import spec_to_pb
from gateway.cli.processes import LocalStack, ServiceProcess
from gateway.client import CLIENT_OPTIONS, Client, Delta, Finished, Options
from gateway.wire import event_from_pb, generation_from_pb
from tests.integration.stacks import tiny_model

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
NUM_STREAMS, NUM_CLIENTS, NUM_TOKENS, NUM_SHORT = 3, 12, 200, 2
LAST_SECONDS = 5.0  # far less than the drain: an idle health stream does not hold it up


@dataclass
class Seen:
    """What the clients of one channel saw."""

    health: list[int] = field(default_factory=list)
    streamed: list[int] = field(default_factory=list)  # tokens of each stream so far
    reasons: list[FinishReason] = field(default_factory=list)
    num_answers: int = 0
    failures: list[str] = field(default_factory=list)


@pytest.fixture
def gateways(tmp_path: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Two over one target and one draft."""
    with LocalStack(model=tiny_model(tmp_path), draft="ngram") as stack:
        assert stack.gateway
        assert stack.target
        assert stack.draft
        peers = [f"--target={stack.target.address}", f"--draft={stack.draft.address}"]
        other = ServiceProcess("gateway", ["--port=0", *peers])
        try:
            other.wait_until_serving(30)
            yield stack.gateway, other
        finally:
            other.kill()


def _spec(num_tokens: int, i: int = 0) -> pb.GenerationSpec:
    options = Options(max_tokens=num_tokens, ignore_eos=True, temperature=0.0)
    return spec_to_pb([5, 6, 7 + i], options)


async def _watch(channel: grpc.aio.Channel, seen: Seen) -> None:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    with contextlib.suppress(grpc.aio.AioRpcError):  # it ends with its gateway
        async for told in stub.Watch(health_pb2.HealthCheckRequest(service="ready")):
            seen.health.append(told.status)


async def _stream(stub: Any, i: int, seen: Seen) -> None:
    request = pb.StreamGenerateRequest(spec=_spec(NUM_TOKENS, i))
    async for response in stub.StreamGenerate(request):
        event = event_from_pb(response)
        if isinstance(event, Delta):
            seen.streamed[i] += len(event.token_ids)
        elif isinstance(event, Finished):
            seen.reasons.append(event.reason)


async def _ask(stub: Any, seen: Seen, over: asyncio.Event) -> None:
    """Short requests without a pause, so that some cross the word that sends clients away."""
    request = pb.GenerateRequest(spec=_spec(NUM_SHORT))
    while not over.is_set():
        try:
            answer = generation_from_pb(await stub.Generate(request))
            assert len(answer.token_ids) == NUM_SHORT
        except (grpc.aio.AioRpcError, AssertionError) as error:
            seen.failures.append(repr(error))
        seen.num_answers += 1


async def _until(holds: Any) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _keep_a_channel(first: ServiceProcess, other: ServiceProcess) -> tuple[Seen, int, float]:
    """Streams and requests over one channel, whose first gateway is told to stop meanwhile.

    Gives what was seen, how many answers came while the first gateway still had streams, and
    the seconds that it took to end after the last of them.
    """
    seen, over = Seen(streamed=[0] * NUM_STREAMS), asyncio.Event()
    name = f"ipv4:{first.address},{other.address}"  # as a DNS name with two addresses
    async with grpc.aio.insecure_channel(name, CLIENT_OPTIONS) as channel:
        stub: Any = gateway_pb2_grpc.GatewayServiceStub(channel)
        watch = asyncio.create_task(_watch(channel, seen))
        streams = [asyncio.create_task(_stream(stub, i, seen)) for i in range(NUM_STREAMS)]
        await _until(lambda: all(seen.streamed))
        clients = [asyncio.create_task(_ask(stub, seen, over)) for _ in range(NUM_CLIENTS)]
        await _until(lambda: seen.num_answers >= NUM_CLIENTS)
        first.terminate()
        await _until(lambda: NOT_SERVING in seen.health)
        before = seen.num_answers
        assert not all(task.done() for task in streams)
        await asyncio.gather(*streams)
        meanwhile = seen.num_answers - before
        began = time.monotonic()
        assert await asyncio.to_thread(first.stop) == 0
        seconds = time.monotonic() - began
        after = seen.num_answers
        await _until(lambda: seen.num_answers > after + NUM_CLIENTS)
        over.set()
        await asyncio.gather(*clients, watch)
    return seen, meanwhile, seconds


def test_a_client_that_keeps_its_channel_goes_to_the_other_gateway(
    gateways: tuple[ServiceProcess, ServiceProcess],
) -> None:
    """No request fails, neither one under way nor a new one, and a health stream is told."""
    seen, meanwhile, seconds = asyncio.run(_keep_a_channel(*gateways))
    assert seen.failures == []
    assert seen.reasons == [FinishReason.LENGTH] * NUM_STREAMS
    assert seen.streamed == [NUM_TOKENS] * NUM_STREAMS
    assert seen.health == [SERVING, NOT_SERVING]
    assert meanwhile > NUM_CLIENTS  # answered while the first one drained
    assert seconds < LAST_SECONDS
    with Client(gateways[1].address) as client:
        assert client.status().num_live_requests == 0
