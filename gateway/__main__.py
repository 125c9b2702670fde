"""`python -m gateway`: run the gateway."""

from __future__ import annotations

import sys

import grpc

from common.config import parse, pin_to_cores
from common.errors import ConfigurationError
from common.service import run
from gateway.api import SERVICE_NAME, GatewayServicer, add_to_server
from gateway.config import GatewayConfig
from gateway.relay import Relay


def main() -> None:
    """Run the gateway until SIGTERM.

    It serves once a target has connected, however long that loads. From then on it stays
    ready: without a target it answers UNAVAILABLE.
    """
    try:
        config = parse(GatewayConfig)
    except ConfigurationError as error:
        sys.exit(f"tandem gateway: {error}")
    pin_to_cores(config.cores)

    async def start(server: grpc.aio.Server) -> Relay:
        relay = Relay(config)
        relay.start()
        await relay.wait_for_target()
        add_to_server(GatewayServicer(config, relay), server)
        return relay

    run(config, [SERVICE_NAME], start)


if __name__ == "__main__":
    main()
