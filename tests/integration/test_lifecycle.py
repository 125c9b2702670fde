"""Health, reflection and draining of real services."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import UnavailableError
from common.types import FinishReason
from gateway.cli.processes import LocalStack, ServiceProcess
from gateway.client import Client, Delta, Finished, Generation, Options
from tests.integration.stacks import tiny_model
from tests.scrape import free_port

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
LONG = Options(max_tokens=200, ignore_eos=True, temperature=0.0)
NAMES = {
    "target": "tandem.v1.TargetService",
    "draft": "tandem.v1.DraftService",
    "gateway": "tandem.v1.GatewayService",
}


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[LocalStack]:
    with LocalStack(model=tiny_model(tmp_path), draft="ngram") as running:
        yield running


def _health(address: str, name: str) -> int:
    with grpc.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        stub: Any = health_pb2_grpc.HealthStub(channel)
        status: int = stub.Check(request, timeout=5).status
        return status


def _services(address: str) -> set[str]:
    with grpc.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
        (answer,) = stub.ServerReflectionInfo(iter(asked), timeout=5)
        return {s.name for s in answer.list_services_response.service}


def _processes(stack: LocalStack) -> dict[str, ServiceProcess]:
    found = {"target": stack.target, "draft": stack.draft, "gateway": stack.gateway}
    return {name: process for name, process in found.items() if process}


class Streams:
    """Long streams that run in threads, each past its first token."""

    def __init__(self, address: str, num: int) -> None:
        self.last: list[Finished] = []
        self.num_tokens: list[int] = []
        self._begun = threading.Barrier(num + 1, timeout=20)
        self._address = address
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(num)]
        for thread in self._threads:
            thread.start()
        self._begun.wait()

    def _run(self, i: int) -> None:
        num_tokens = 0
        with Client(self._address) as client:
            for event in client.stream([5, 6, 7 + i], LONG):
                if isinstance(event, Delta):
                    if num_tokens == 0:
                        self._begun.wait()
                    num_tokens += len(event.token_ids)
                if isinstance(event, Finished):
                    self.last.append(event)
        self.num_tokens.append(num_tokens)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=30)

    def assert_whole(self) -> None:
        assert [f.reason for f in self.last] == [FinishReason.LENGTH] * len(self._threads)
        assert self.num_tokens == [200] * len(self._threads)


def _refusal(client: Client) -> UnavailableError:
    """What a client hears once the gateway has noticed that it is to stop."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            client.generate([5, 6], max_tokens=1)
        except UnavailableError as error:
            return error
    raise AssertionError("new requests are still served")


def test_health_and_reflection(stack: LocalStack) -> None:
    for kind, process in _processes(stack).items():
        for name in ("", "live", "ready", NAMES[kind]):
            assert _health(process.address, name) == SERVING
        assert {NAMES[kind], "grpc.health.v1.Health"} <= _services(process.address)


def test_a_gateway_that_waits_for_its_target_is_live_but_not_ready() -> None:
    port = free_port()  # the gateway tells its own only once it serves
    gateway = ServiceProcess("gateway", ["--target=127.0.0.1:1", f"--port={port}"])
    try:
        address, deadline = f"127.0.0.1:{port}", time.monotonic() + 20
        while True:
            try:
                assert _health(address, "live") == SERVING
                break
            except grpc.RpcError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert _health(address, "ready") == NOT_SERVING
        with Client(address) as client, pytest.raises(UnavailableError, match="is starting"):
            client.generate([5, 6], max_tokens=1)
    finally:
        assert gateway.stop() == 0


def test_a_gateway_that_drains_finishes_its_streams(tmp_path: Path) -> None:
    """Who knows no other one is told that it is gone, while probes are told that it is live."""
    probed = f"127.0.0.1:{free_port()}"
    args = [f"--health-port={probed.rpartition(':')[2]}"]
    with LocalStack(model=tiny_model(tmp_path), draft="ngram", gateway_args=args) as stack:
        assert stack.gateway
        streams = Streams(stack.gateway_address, 5)
        with Client(stack.gateway_address) as client:
            client.models()  # over a connection from before
            stack.gateway.terminate()
            assert f"no gateway at {stack.gateway_address}" in str(_refusal(client))
            if not streams.last:
                assert _health(probed, "ready") == NOT_SERVING
                assert _health(probed, "live") == SERVING
        streams.join()
        streams.assert_whole()
        assert stack.gateway.stop() == 0


def test_a_target_that_drains_finishes_its_sequences(stack: LocalStack) -> None:
    assert stack.target
    streams = Streams(stack.gateway_address, 3)
    assert stack.target.stop() == 0
    streams.join()
    streams.assert_whole()
    with Client(stack.gateway_address) as client:
        with pytest.raises(UnavailableError) as caught:
            client.generate([5, 6], max_tokens=1)
        assert caught.value.retry_after_seconds
    assert _health(stack.gateway_address, "ready") == SERVING


def test_without_a_draft(tmp_path: Path) -> None:
    with (
        LocalStack(model=tiny_model(tmp_path), draft="none") as stack,
        Client(stack.gateway_address) as client,
    ):
        answer: Generation = client.generate([5, 6, 7], LONG)
        assert len(answer.token_ids) == 200
        assert answer.started.max_lookahead == 0
