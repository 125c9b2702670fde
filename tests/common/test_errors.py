"""Errors on their way to a client and back."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from common.errors import (
    ConfigurationError,
    InternalFaultError,
    InvalidRequestError,
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
