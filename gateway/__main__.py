"""`python -m gateway`: run the gateway."""

from __future__ import annotations

import os

import grpc

from common import telemetry
from common.config import parse, pin_to_cores
from common.metrics import serve, watch_spans
from common.service import run
from gateway.api import SERVICE_NAME, GatewayServicer, add_to_server
from gateway.config import GatewayConfig
from gateway.relay import Relay
from gateway.spans import GatewaySpans


def main() -> None:
    """Run the gateway until SIGTERM.

    It serves once a target has connected, however long that loads. From then on it stays
    ready: without a target it answers UNAVAILABLE.
    """
    config = parse(GatewayConfig, environ=os.environ)
    pin_to_cores(config.cores, config.named("cores"))
    tracing = telemetry.from_environment(config.name, os.environ)

    async def start(server: grpc.aio.Server) -> Relay:
        relay = Relay(config)
        watch_spans(relay.metrics.metrics, tracing)
        serve(config, relay.metrics.metrics)
        relay.start()
        await relay.wait_for_target()
        spans = GatewaySpans(tracing)
        add_to_server(GatewayServicer(config, relay, spans), server)
        return relay

    run(config, [SERVICE_NAME], start, tracing, sends_clients_away=True)


if __name__ == "__main__":
    main()
