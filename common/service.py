"""One lifecycle for all services: load, warm up, SERVING, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, cast

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common import logs
from common.config import ServiceConfig
from common.errors import ConfigurationError, UnavailableError, status_details
from common.telemetry import Tracing

log = logging.getLogger(__name__)
FLUSH_SECONDS = 3.0
"""How long a collector may take for the last spans."""
LAST_SECONDS = 1.0
"""What RPCs that are left have to end by themselves; a health `Watch` never does."""
OPENING_SECONDS = 0.2
"""How long a request that had come before its client was sent away may take to be live."""

CHANNEL_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]
"""For channels between our services: a vanished peer is noticed within 20 s."""

_SERVER_OPTIONS: list[tuple[str, int]] = [
    ("grpc.so_reuseport", 0),  # two services on one port is a mistake, not a feature
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
]


class Running(Protocol):
    """What a started service can be asked for."""

    @property
    def failed(self) -> asyncio.Future[None]:
        """Ends with an error when the service can't go on."""

    def drain(self, grace_seconds: float) -> None:
        """Take nothing new."""

    def num_live(self) -> int:
        """How many requests or sequences are not finished."""

    async def stop(self) -> None:
        """End what is left and free everything."""


Start = Callable[[grpc.aio.Server], Awaitable[Running]]
"""Loads, warms up, adds servicers to the running server; raises `ConfigurationError` if not."""


def run(
    config: ServiceConfig,
    service_names: Sequence[str],
    start: Start,
    tracing: Tracing | None = None,
    *,
    sends_clients_away: bool = False,
) -> None:
    """Run a service until SIGTERM or SIGINT; exits non-zero if it fails.

    service_names are full protobuf names, for health and reflection. Spans that wait are
    exported at the end, whatever it is. sends_clients_away: those who ask it may as well ask
    another one, and are told so when it begins to drain; not for services whose clients hold
    streams that need the connection, and hear `Draining` there.
    """
    logs.set_up(config)
    tracing = tracing or Tracing(config.name)
    serving = _serve(config, service_names, start, tracing, sends_clients_away)
    if refusal := asyncio.run(_refusal(config, serving)):
        sys.exit(f"tandem {config.name}: {refusal}")


async def _refusal(config: ServiceConfig, serving: Awaitable[None]) -> str:
    """Why the service can't be; empty after it has served."""
    try:
        await serving
    except ConfigurationError as error:
        error.__traceback__ = None  # whose frames would keep the servers beyond their event loop
        return config.told(error)
    return ""


async def _serve(
    config: ServiceConfig,
    service_names: Sequence[str],
    start: Start,
    tracing: Tracing,
    sends_clients_away: bool,
) -> None:
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    told: asyncio.Future[Any] = loop.create_task(told_to_stop.wait())
    gate = _Gate(config.name)
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[gate])
    port = _bind(server, config.host, config.port, "--port")
    probed = await _Health.start(config, service_names, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    await server.start()
    began = time.monotonic()
    starting: asyncio.Future[Running] = asyncio.ensure_future(
        start(cast(grpc.aio.Server, _Registrar(server)))
    )
    await asyncio.wait([starting, told], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        log.info("told to stop while starting")
        os._exit(0)  # a thread that loads a model can't be interrupted
    running = starting.result()
    gate.open = True
    await probed.tell(ready=True)
    # Whoever started us may read the port from this line.
    print(  # noqa: T201
        f"tandem {config.name} serves on {config.host}:{port}"
        f" after {time.monotonic() - began:.1f} s",
        flush=True,
    )
    failed: asyncio.Future[Any] = running.failed
    await asyncio.wait([told, failed], return_when=asyncio.FIRST_COMPLETED)
    await probed.tell(ready=False)
    leaving: list[asyncio.Future[None]] = []
    if not failed.done():
        log.info("draining %d live, for %.0f s at most", running.num_live(), config.drain_seconds)
        deadline = time.monotonic() + config.drain_seconds
        if sends_clients_away:
            leaving.append(await _send_clients_away(server, failed, config.drain_seconds))
        running.drain(max(0.0, deadline - time.monotonic()))
        while running.num_live() and time.monotonic() < deadline and not failed.done():
            await asyncio.wait([failed], timeout=0.05)
    if failed.done():
        await probed.tell(ready=False, live=False)
        await running.stop()
        await server.stop(grace=0.2)
        log.error("stopped by a failure: %s", failed.exception())
        await asyncio.to_thread(tracing.shutdown, FLUSH_SECONDS)
        logging.shutdown()
        os._exit(1)  # an engine's thread that hangs can't be joined
    await running.stop()
    await asyncio.gather(server.stop(grace=LAST_SECONDS), *leaving)
    await asyncio.to_thread(tracing.shutdown, FLUSH_SECONDS)
    await probed.stop()
    log.info("stopped")


async def _send_clients_away(
    server: grpc.aio.Server, failed: asyncio.Future[Any], drain_seconds: float
) -> asyncio.Future[None]:
    """Tell every connection to open nothing more, and close the port; what runs goes on.

    What is returned ends when nothing runs any more. gRPC takes no request from now on. What
    it took before may not be live yet, and is not to be refused: it has a moment for that.
    """
    # This sends GOAWAY at once. Whatever outlives the drain is ended by its owner first.
    ending = server.stop(grace=drain_seconds + LAST_SECONDS)
    leaving: asyncio.Future[None] = asyncio.ensure_future(ending)
    await asyncio.wait(
        [leaving, failed],
        timeout=min(OPENING_SECONDS, drain_seconds),
        return_when=asyncio.FIRST_COMPLETED,
    )
    return leaving


class _Health:
    """What probes hear: at the service's own port, and at `--health-port` to the very end.

    The second port stays plaintext whatever the first one will ask for, and has nothing else.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._servicer = health.aio.HealthServicer()
        self._of_ready = ("", "ready", *service_names)
        self._server: grpc.aio.Server | None = None  # set by `start` where there is a second port

    @classmethod
    async def start(
        cls, config: ServiceConfig, service_names: Sequence[str], server: grpc.aio.Server
    ) -> _Health:
        """Live and not ready; joins the service's server, which has not been started."""
        probed = cls(service_names)
        await probed.tell(ready=False)
        health_pb2_grpc.add_HealthServicer_to_server(probed._servicer, server)
        if config.health_port:
            if config.health_port == config.port:
                raise ConfigurationError(
                    f"{config.port} is the service's own port; choose another one",
                    field="--health-port",
                )
            probed._server = grpc.aio.server(options=_SERVER_OPTIONS)
            _bind(probed._server, config.host, config.health_port, "--health-port")
            health_pb2_grpc.add_HealthServicer_to_server(probed._servicer, probed._server)
            await probed._server.start()
        return probed

    async def tell(self, *, ready: bool, live: bool = True) -> None:
        """Change what probes hear from now on."""
        told = health_pb2.HealthCheckResponse
        for name in self._of_ready:
            await self._servicer.set(name, told.SERVING if ready else told.NOT_SERVING)
        await self._servicer.set("live", told.SERVING if live else told.NOT_SERVING)

    async def stop(self) -> None:
        """End the second port."""
        if self._server is not None:
            await self._server.stop(grace=None)


class _Registrar:
    """Takes servicers for a server that runs already.

    grpc.aio finds methods by their generic handlers at any time; registering them one by one as
    well is an optimisation that it has before the start only, and warns about after.
    """

    def __init__(self, server: grpc.aio.Server) -> None:
        self.add_generic_rpc_handlers = server.add_generic_rpc_handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Nothing: see above."""


class _Gate(grpc.aio.ServerInterceptor):
    """Lets health and reflection through from the first moment, the rest once it is open."""

    def __init__(self, name: str) -> None:
        self.open = False  # set once the service has started
        self._name = name

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The RPC's handler, or one that says to come back later."""
        if self.open or handler_call_details.method.startswith("/grpc."):
            return await continuation(handler_call_details)
        return grpc.stream_stream_rpc_method_handler(self._not_yet)

    async def _not_yet(self, _: Any, context: Any) -> None:
        error = UnavailableError(f"the {self._name} is starting", retry_after_seconds=1.0)
        await context.abort(error.code, str(error), status_details(error))


def _bind(server: grpc.aio.Server, host: str, port: int, flag: str) -> int:
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigurationError(f"{host} is no address here", field="--host") from error
    try:
        return server.add_insecure_port(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigurationError(
            f"{host}:{port} can't be bound; choose a free one", field=flag
        ) from error
