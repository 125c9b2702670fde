"""`--health-port` of real services: what probes hear there from load to the very end."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem.v1 import draft_pb2_grpc

from common import wire
from common.types import CloseSequence, OpenSequence, SamplingParams
from gateway.cli.processes import ServiceProcess, StackError
from tests.integration.collector import BlackHole

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
SERVING, NOT_SERVING = (
    health_pb2.HealthCheckResponse.SERVING,
    health_pb2.HealthCheckResponse.NOT_SERVING,
)
READY, NOT_READY = {"live": SERVING, "ready": SERVING}, {"live": SERVING, "ready": NOT_SERVING}
TRACED = f"00-{7:032x}-{7:016x}-01"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _health(address: str) -> dict[str, int] | None:
    """What a probe hears; None where nobody answers."""
    found = {}
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        for name in ("live", "ready"):
            try:
                request = health_pb2.HealthCheckRequest(service=name)
                found[name] = stub.Check(request, timeout=2).status
            except grpc.RpcError:
                return None
    return found


def _until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextlib.contextmanager
def _open_sequence(address: str) -> Iterator[Callable[[], None]]:
    """A draft with a live, traced sequence; gives what closes it."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    opened = OpenSequence(1, (5, 6, 5, 6), 4, SamplingParams(), lookahead=4, traceparent=TRACED)
    requests.put(wire.propose_request([opened]))
    with grpc.insecure_channel(address) as channel:
        stub = draft_pb2_grpc.DraftServiceStub(channel)
        replies: Any = stub.Propose(iter(requests.get, None))
        assert next(replies) is not None  # it is drafted
        try:
            yield lambda: requests.put(wire.propose_request([CloseSequence(1)]))
        finally:
            requests.put(None)
            replies.cancel()


def test_a_draft_tells_ready_then_draining_then_live_to_the_end() -> None:
    """While the last spans wait for a collector that swallows them, only this port answers."""
    probed = f"127.0.0.1:{_free_port()}"
    args = ["--port=0", f"--health-port={probed.rpartition(':')[2]}"]
    with BlackHole() as hole:
        draft = ServiceProcess("draft_service", args, env=hole.env)
        try:
            address = draft.wait_until_serving(30)
            assert _health(probed) == _health(address) == READY
            with _open_sequence(address) as close:
                draft.terminate()
                _until(lambda: _health(probed) == NOT_READY)
                assert _health(address) == NOT_READY
                close()
                _until(lambda: _health(address) is None)
                assert _health(probed) == NOT_READY
            assert draft.stop() == 0
            assert _health(probed) is None
        finally:
            draft.kill()


def test_a_gateway_without_a_target_is_live_there_and_answers_nothing_else() -> None:
    probed = f"127.0.0.1:{_free_port()}"
    args = ["--port=0", "--target=127.0.0.1:1", f"--health-port={probed.rpartition(':')[2]}"]
    gateway = ServiceProcess("gateway", args)
    try:
        _until(lambda: _health(probed) is not None)
        assert _health(probed) == NOT_READY
        with grpc.insecure_channel(probed) as channel:
            ask: Any = channel.unary_unary("/tandem.v1.GatewayService/ListModels")
            with pytest.raises(grpc.RpcError) as caught:
                ask(b"", timeout=5)
        error: Any = caught.value
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        assert gateway.stop() == 0


def test_a_health_port_is_not_the_service_s_own(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    draft = ServiceProcess("draft_service", [f"--port={port}", f"--health-port={port}"])
    with pytest.raises(StackError, match="ended with code 1"):
        draft.wait_until_serving(30)
    says = f"tandem draft: --health-port: {port} is the service's own port; choose another one"
    assert says in capfd.readouterr().err


def test_a_health_port_that_is_taken_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        env = {"TANDEM_HEALTH_PORT": str(port)}
        draft = ServiceProcess("draft_service", ["--port=0"], env=env)
        with pytest.raises(StackError, match="ended with code 1"):
            draft.wait_until_serving(30)
    says = f"tandem draft: TANDEM_HEALTH_PORT: 127.0.0.1:{port} can't be bound; choose a free one"
    told = capfd.readouterr().err
    assert says in told
    assert "Traceback" not in told
