"""The target's edge: protobuf in, events to the engine, verdicts out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
from tandem.v1 import target_pb2 as pb
from tandem.v1 import target_pb2_grpc

from common import wire
from common.engine.block_manager import BlockManager
from common.engine.loader import LoadedModel, load
from common.engine_host import EngineHost, Observer
from common.errors import TandemError, sequence_error
from common.leases import Lease
from common.metrics import Metrics, serve, watch_spans
from common.sequence_log import SequenceLog
from common.telemetry import Tracing
from common.types import Verdict
from target_service.config import TargetConfig
from target_service.engine import TargetEngine
from target_service.goodput import Fixed, Goodput, Objective
from target_service.metrics import TargetMetrics
from target_service.scheduler import SchedulerConfig
from target_service.spans import TargetSpans
from target_service.warmup import measure


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Serves one model to any number of gateways."""

    def __init__(self, host: EngineHost, loaded: LoadedModel) -> None:
        self._host = host
        self._loaded = loaded

    async def Verify(  # noqa: N802
        self,
        request_iterator: AsyncIterator[pb.VerifyRequest],
        context: grpc.aio.ServicerContext[pb.VerifyRequest, pb.VerifyResponse],
    ) -> AsyncIterator[pb.VerifyResponse]:
        """All sequences of one gateway."""
        async for batch in self._host.run_stream(request_iterator, self._receive):
            yield wire.verify_response(batch)

    async def GetModel(  # noqa: N802
        self,
        request: pb.TargetServiceGetModelRequest,
        context: grpc.aio.ServicerContext[
            pb.TargetServiceGetModelRequest, pb.TargetServiceGetModelResponse
        ],
    ) -> pb.TargetServiceGetModelResponse:
        """What is served."""
        return pb.TargetServiceGetModelResponse(model=wire.model_to_pb(self._loaded.info))

    async def GetTokenizer(  # noqa: N802
        self,
        request: pb.GetTokenizerRequest,
        context: grpc.aio.ServicerContext[pb.GetTokenizerRequest, pb.GetTokenizerResponse],
    ) -> pb.GetTokenizerResponse:
        """The tokenizer's files."""
        return pb.GetTokenizerResponse(files=self._loaded.tokenizer_files)

    def _receive(self, lease: Lease, request: pb.VerifyRequest) -> None:
        for message in request.opens:
            try:
                self._host.open(lease, wire.open_from_pb(message))
            except TandemError as error:
                refusal = Verdict(message.sequence_id, 0, 0, 0, (), error=sequence_error(error))
                lease.outbox.put(refusal)
        for event in wire.target_events(request):
            lease.submit(event)
        self._host.echo(lease, map(wire.heartbeat_from_pb, request.heartbeats))


SERVICE_NAMES = (pb.DESCRIPTOR.services_by_name["TargetService"].full_name,)


async def start(config: TargetConfig, tracing: Tracing, server: grpc.aio.Server) -> EngineHost:
    """Load the model, add the servicer and begin stepping."""
    loaded = await asyncio.to_thread(load, config)
    blocks = BlockManager(
        loaded.num_blocks, loaded.info.block_size, prefix_cache=config.prefix_cache
    )
    cost = await asyncio.to_thread(measure, loaded.model, blocks, config.max_rows)
    fixed = config.objective == "fixed"
    engine = TargetEngine(
        loaded.model,
        blocks,
        eos_token_ids=loaded.info.eos_token_ids,
        config=SchedulerConfig(
            max_running=config.max_running,
            max_rows=config.max_rows,
            max_waiting=config.max_waiting,
            prefill_seconds=config.prefill_ms / 1e3,
            watermark=config.watermark,
            age_seconds=config.age_seconds,
        ),
        noise=loaded.noise,
        policy=Fixed() if fixed else Goodput(cost, Objective(config.objective)),
    )
    metrics = Metrics(config.name, config.pool)
    watch_spans(metrics, tracing)
    serve(config, metrics)
    observers: list[Observer] = [
        TargetSpans(tracing),
        TargetMetrics(metrics.of(loaded.info.name)),
        SequenceLog(),
    ]
    host = EngineHost(engine, observers)
    servicer = TargetServicer(host, loaded)
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
    host.start()
    return host
