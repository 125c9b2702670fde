"""The draft's edge: protobuf in, events to the engine, proposals out. No torch here."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc
from tandem.v1 import draft_pb2 as pb
from tandem.v1 import draft_pb2_grpc

from common import wire
from common.engine_host import EngineHost, Observer
from common.errors import TandemError, sequence_error
from common.leases import Lease
from common.metrics import Metrics, serve, watch_spans
from common.sequence_log import SequenceLog
from common.telemetry import Tracing
from common.types import ModelInfo, Refusal
from draft_service.config import DraftConfig
from draft_service.drafters import Drafter
from draft_service.engine import DraftEngine
from draft_service.metrics import DraftMetrics
from draft_service.spans import DraftSpans

SERVICE_NAMES = (pb.DESCRIPTOR.services_by_name["DraftService"].full_name,)


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves one drafter to any number of gateways."""

    def __init__(self, host: EngineHost, info: ModelInfo) -> None:
        self._host = host
        self._info = info

    async def Propose(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.ProposeRequest],
        context: grpc.aio.ServicerContext[pb.ProposeRequest, pb.ProposeResponse],
    ) -> AsyncIterator[pb.ProposeResponse]:
        """All sequences of one gateway."""
        async for batch in self._host.run_stream(request_iterator, self._receive):
            yield wire.propose_response(batch)

    async def GetModel(  # noqa: N802
        self,
        request: pb.DraftServiceGetModelRequest,
        context: grpc.aio.ServicerContext[
            pb.DraftServiceGetModelRequest, pb.DraftServiceGetModelResponse
        ],
    ) -> pb.DraftServiceGetModelResponse:
        """What drafts."""
        return pb.DraftServiceGetModelResponse(model=wire.model_to_pb(self._info))

    def _receive(self, lease: Lease, request: pb.ProposeRequest) -> None:
        for message in request.opens:
            try:
                self._host.open(lease, wire.open_from_pb(message))
            except TandemError as error:
                lease.outbox.put(Refusal(message.sequence_id, sequence_error(error)))
        for event in wire.draft_events(request):
            lease.submit(event)
        self._host.echo(lease, map(wire.heartbeat_from_pb, request.heartbeats))


async def start(
    config: DraftConfig,
    make_drafter: Callable[[], tuple[Drafter, ModelInfo]],
    tracing: Tracing,
    server: grpc.aio.Server,
) -> EngineHost:
    """Make the drafter, add the servicer and begin stepping."""
    drafter, info = await asyncio.to_thread(make_drafter)
    metrics = Metrics(config.name, config.pool)
    watch_spans(metrics, tracing)
    serve(config, metrics)
    observers: list[Observer] = [
        DraftSpans(tracing),
        DraftMetrics(metrics.of(info.name)),
        SequenceLog(),
    ]
    host = EngineHost(DraftEngine(drafter), observers)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer(host, info), server)
    host.start()
    return host
