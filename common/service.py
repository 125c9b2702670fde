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
) -> None:
    """Run a service until SIGTERM or SIGINT; exits non-zero if it fails.

    service_names are full protobuf names, for health and reflection. Spans that wait are
    exported at the end, whatever it is.
    """
    logs.set_up(config)
    try:
        asyncio.run(_serve(config, service_names, start, tracing or Tracing(config.name)))
    except ConfigurationError as error:
        sys.exit(f"tandem {config.name}: {error}")


async def _serve(
    config: ServiceConfig, service_names: Sequence[str], start: Start, tracing: Tracing
) -> None:
    loop = asyncio.get_running_loop()
    told_to_stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told_to_stop.set)
    told: asyncio.Future[Any] = loop.create_task(told_to_stop.wait())
    gate = _Gate(config.name)
    server = grpc.aio.server(options=_SERVER_OPTIONS, interceptors=[gate])
    port = _bind(server, config)
    healthy = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    names = (*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    watched = ("", "live", "ready", *service_names)
    await _set_health(healthy, watched, serving=False)
    await _set_health(healthy, ["live"], serving=True)
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
    await _set_health(healthy, watched, serving=True)
    # Whoever started us may read the port from this line.
    print(  # noqa: T201
        f"tandem {config.name} serves on {config.host}:{port}"
        f" after {time.monotonic() - began:.1f} s",
        flush=True,
    )
    failed: asyncio.Future[Any] = running.failed
    await asyncio.wait([told, failed], return_when=asyncio.FIRST_COMPLETED)
    await _set_health(healthy, [n for n in watched if n != "live"], serving=False)
    if not failed.done():
        log.info("draining %d live, for %.0f s at most", running.num_live(), config.drain_seconds)
        running.drain(config.drain_seconds)
        deadline = time.monotonic() + config.drain_seconds
        while running.num_live() and time.monotonic() < deadline and not failed.done():
            await asyncio.wait([failed], timeout=0.05)
    if failed.done():
        await _set_health(healthy, ["live"], serving=False)
        await running.stop()
        await server.stop(grace=0.2)
        log.error("stopped by a failure: %s", failed.exception())
        await asyncio.to_thread(tracing.shutdown, FLUSH_SECONDS)
        logging.shutdown()
        os._exit(1)  # an engine's thread that hangs can't be joined
    await running.stop()
    await server.stop(grace=1.0)
    await asyncio.to_thread(tracing.shutdown, FLUSH_SECONDS)
    log.info("stopped")


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


def _bind(server: grpc.aio.Server, config: ServiceConfig) -> int:
    try:
        socket.getaddrinfo(config.host, None)
    except OSError as error:
        raise ConfigurationError(f"{config.host} is no address here", field="--host") from error
    try:
        return server.add_insecure_port(f"{config.host}:{config.port}")
    except RuntimeError as error:
        raise ConfigurationError(
            f"{config.host}:{config.port} can't be bound; choose a free one", field="--port"
        ) from error


async def _set_health(
    healthy: health.aio.HealthServicer, names: Sequence[str], *, serving: bool
) -> None:
    status = (
        health_pb2.HealthCheckResponse.SERVING
        if serving
        else health_pb2.HealthCheckResponse.NOT_SERVING
    )
    for name in names:
        await healthy.set(name, status)
