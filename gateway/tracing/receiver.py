"""An OTLP/gRPC endpoint for traces."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb

from common.errors import ConfigurationError
from gateway.tracing.spans import from_otlp
from gateway.tracing.store import Store

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class Receiver:
    """A server that puts what it is sent into a store; a context manager.

    Raises `ConfigurationError` if it can't listen there. `address` has the port that was
    taken if port 0 was asked for.
    """

    def __init__(self, store: Store, listen: str = "127.0.0.1:4317") -> None:
        self._store = store
        self._server = grpc.server(
            ThreadPoolExecutor(max_workers=2, thread_name_prefix="otlp"),
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)],
        )
        export = grpc.unary_unary_rpc_method_handler(
            self._export,
            request_deserializer=pb.ExportTraceServiceRequest.FromString,
            response_serializer=pb.ExportTraceServiceResponse.SerializeToString,
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"Export": export})
        self._server.add_generic_rpc_handlers((handler,))
        try:
            port = self._server.add_insecure_port(listen)
        except RuntimeError as error:
            raise ConfigurationError(
                f"{listen} can't be bound; is there another collector?", field="--listen"
            ) from error
        self.address = f"{listen.rpartition(':')[0]}:{port}"

    @property
    def environment(self) -> dict[str, str]:
        """What makes a service of ours send its traces here, soon after they end."""
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{self.address}",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://{self.address}",
            "OTEL_TRACES_EXPORTER": "otlp",
            "OTEL_BSP_SCHEDULE_DELAY": "250",
        }

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._server.stop(grace=0.2).wait()

    def _export(
        self, request: pb.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> pb.ExportTraceServiceResponse:
        self._store.add(from_otlp(request.resource_spans))
        return pb.ExportTraceServiceResponse()
