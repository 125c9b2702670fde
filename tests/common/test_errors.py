"""Errors on their way to a client and back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from common.errors import (
    CapacityError,
    ConfigurationError,
    InternalFaultError,
    InvalidRequestError,
    NotFoundError,
    TandemError,
    connection_failure,
    error_for,
    error_from_rpc,
    status_details,
)


def call_that_fails(error: TandemError) -> TandemError:
    """What a client makes of an error that a server has aborted with."""

    async def fail(request: bytes, context: Any) -> bytes:
        await context.abort(error.code, str(error), status_details(error))
        return b""

    async def main() -> TandemError:
        server = grpc.aio.server()
        handler: Any = grpc.unary_unary_rpc_method_handler(fail)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("test.Service", {"Fail": handler})]
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                call: Any = channel.unary_unary("/test.Service/Fail")
                await call(b"")
        except grpc.aio.AioRpcError as told:
            return error_from_rpc(told)
        finally:
            await server.stop(None)
        raise AssertionError("the call must fail")

    return asyncio.run(main())


@pytest.mark.parametrize("kind", TandemError.__subclasses__())
def test_an_error_comes_back_as_it_went(kind: type[TandemError]) -> None:
    for error in (
        kind("is wrong", field="some.field", retry_after_seconds=1.5),
        kind("says ünicode"),
    ):
        back = call_that_fails(error)
        assert type(back) is kind
        assert str(back) == str(error)
        assert (back.message, back.field) == (error.message, error.field)
        assert back.retry_after_seconds == error.retry_after_seconds


def details(error: TandemError) -> dict[str, Any]:
    """What a program finds in the trailing metadata, by the names of the messages."""
    ((key, value),) = status_details(error)
    assert key == "grpc-status-details-bin"
    status = status_pb2.Status.FromString(value)
    assert (status.code, status.message) == (error.code.value[0], str(error))
    kinds = (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo)
    found = {}
    for packed in status.details:
        for kind in kinds:
            message = kind()
            if packed.Unpack(message):
                found[kind.__name__] = message
    assert len(found) == len(status.details)
    return found


def test_programs_find_reason_field_and_retry_time() -> None:
    wrong = details(InvalidRequestError("is 2", field="sampling.top_p"))
    assert set(wrong) == {"ErrorInfo", "BadRequest"}
    info = wrong["ErrorInfo"]
    assert (info.reason, info.domain) == ("INVALID_REQUEST", "tandem.v1")
    assert dict(info.metadata) == {"field": "sampling.top_p"}
    (violation,) = wrong["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("sampling.top_p", "is 2")
    missing = details(NotFoundError("is not served", field="model"))
    assert set(missing) == {"ErrorInfo"}
    assert dict(missing["ErrorInfo"].metadata) == {"field": "model"}
    setting = details(ConfigurationError("is -1", field="--lookahead"))
    assert dict(setting["ErrorInfo"].metadata) == {"setting": "--lookahead"}
    full = details(CapacityError("full", retry_after_seconds=0.25))
    assert set(full) == {"ErrorInfo", "RetryInfo"}
    assert full["RetryInfo"].retry_delay.ToNanoseconds() == 250_000_000
    assert dict(full["ErrorInfo"].metadata) == {}


def test_codes_that_nobody_of_ours_sends_are_internal() -> None:
    assert type(error_for(15, "data loss")) is InternalFaultError
    assert type(error_for(3, "bad")) is InvalidRequestError
    assert type(error_for(9, "bad")) is ConfigurationError


def test_why_there_is_no_connection_is_said_shortly() -> None:
    refused = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:9:"
        " Failed to connect to remote host: Connection refused"
    )
    unknown = "errors resolving a.b:1: [field:hostname lookup error: Domain name not found]"
    assert connection_failure(refused) == "connection refused"
    assert connection_failure(unknown) == "the name can't be resolved"
    assert connection_failure("Socket closed") == "Socket closed"
