"""One exception tree, one mapping to gRPC.

TandemError
├── InvalidRequestError      INVALID_ARGUMENT     a field of the request is wrong
├── NotServedError           UNIMPLEMENTED        a field asks for what is not served (yet)
├── NotFoundError            NOT_FOUND            no such model
├── CapacityError            RESOURCE_EXHAUSTED   no room; may say when to try again
├── UnavailableError         UNAVAILABLE          a peer is missing; may say when to try again
├── TimedOutError            DEADLINE_EXCEEDED    the caller's time is over
├── AbandonedError           CANCELLED            the caller is gone or does not read
├── ConfigurationError       FAILED_PRECONDITION  a setting, a model or a pair does not fit
└── InternalFaultError       INTERNAL             our fault, or a model that yields NaN

A message reads on after the field's name: "sampling.top_p: is 2, must be ...".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

DOMAIN = "tandem.v1"
"""Whose reasons these are, for `ErrorInfo`."""


MAX_TOLD = 400
"""Characters of a message that goes out, since it may quote what came in."""


@dataclass(frozen=True, slots=True)
class SequenceError:
    """An error as it travels inside a stream, where it ends one sequence."""

    code: int  # number of a gRPC status code
    reason: str
    message: str
    field: str = ""
    retry_after_seconds: float | None = None


class TandemError(Exception):
    """Anything that ends a request or a service for a reason that can be told."""

    code: ClassVar[grpc.StatusCode] = grpc.StatusCode.UNKNOWN
    reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self, message: str, *, field: str = "", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.message = message
        self.field = field
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(TandemError):
    """A field of the request is wrong."""

    code = grpc.StatusCode.INVALID_ARGUMENT
    reason = "INVALID_REQUEST"


class NotServedError(TandemError):
    """A field asks for what is not served."""

    code = grpc.StatusCode.UNIMPLEMENTED
    reason = "NOT_SERVED"


class NotFoundError(TandemError):
    """There is no such model."""

    code = grpc.StatusCode.NOT_FOUND
    reason = "NOT_FOUND"


class CapacityError(TandemError):
    """There is no room for this request."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "NO_CAPACITY"


class UnavailableError(TandemError):
    """A peer that is needed is missing."""

    code = grpc.StatusCode.UNAVAILABLE
    reason = "UNAVAILABLE"


class TimedOutError(TandemError):
    """The caller's time is over."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED
    reason = "TIMED_OUT"


class AbandonedError(TandemError):
    """The caller is gone, or does not read."""

    code = grpc.StatusCode.CANCELLED
    reason = "ABANDONED"


class ConfigurationError(TandemError):
    """A setting, a model or a pair of services does not fit."""

    code = grpc.StatusCode.FAILED_PRECONDITION
    reason = "CONFIGURATION"


class InternalFaultError(TandemError):
    """Our own fault, or a model that yields no numbers."""

    code = grpc.StatusCode.INTERNAL
    reason = "INTERNAL_FAULT"


_BY_CODE: dict[int, type[TandemError]] = {
    kind.code.value[0]: kind for kind in TandemError.__subclasses__()
}


def sequence_error(error: TandemError) -> SequenceError:
    """An exception as it travels inside a stream."""
    return SequenceError(
        code=error.code.value[0],
        reason=error.reason,
        message=error.message,
        field=error.field,
        retry_after_seconds=error.retry_after_seconds,
    )


def error_for(
    code: int, message: str, field: str = "", retry_after_seconds: float | None = None
) -> TandemError:
    """The exception of a status code's number."""
    kind = _BY_CODE.get(code, InternalFaultError)
    return kind(message, field=field, retry_after_seconds=retry_after_seconds)


_DETAILS = "grpc-status-details-bin"


def told_by_service(error: grpc.RpcError) -> bool:
    """Whether the other side said it, and not our end of the connection."""
    metadata: Any = error.trailing_metadata() or ()
    return any(key == _DETAILS for key, _ in metadata)


def error_from_rpc(error: grpc.RpcError) -> TandemError:
    """The exception behind a failed call, with field and retry time if the server told them."""
    code: grpc.StatusCode = error.code()
    message, field, retry = error.details() or code.name, "", None
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == _DETAILS:
            for detail in status_pb2.Status.FromString(value).details:
                violation = error_details_pb2.BadRequest()
                info, delay = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
                if detail.Unpack(violation) and violation.field_violations:
                    field = violation.field_violations[0].field
                    message = violation.field_violations[0].description
                elif detail.Unpack(info):
                    field = field or info.metadata.get("field") or info.metadata.get("setting", "")
                    message = message.removeprefix(f"{field}: ") if field else message
                elif detail.Unpack(delay):
                    retry = delay.retry_delay.ToNanoseconds() / 1e9
    return error_for(code.value[0], message, field, retry)


def clipped(text: str) -> str:
    """The text, as much of it as surely fits into trailing metadata."""
    return text if len(text) <= MAX_TOLD else f"{text[: MAX_TOLD - 1]}…"


def connection_failure(details: str) -> str:
    """Why there is no connection, out of gRPC's long words for it; others stay as they are."""
    if "errors resolving" in details:
        return "the name can't be resolved"
    if "failed to connect" in details.lower():
        return details.rpartition(": ")[2].lower()
    return details


def status_details(error: TandemError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata that tells a program what str(error) tells a person (AIP-193).

    The field is in `ErrorInfo` (`setting` for a flag of ours) and, if it is the request's
    fault, in `BadRequest`.
    """
    known = {"setting" if error.field.startswith("--") else "field": error.field}
    details = [
        error_details_pb2.ErrorInfo(
            reason=error.reason, domain=DOMAIN, metadata=known if error.field else None
        )
    ]
    packed = []
    if error.field and isinstance(error, InvalidRequestError):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field, description=clipped(error.message)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_seconds is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(round(error.retry_after_seconds * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    for detail in details:
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    code = code_pb2.Code.Value(error.code.name)
    status = status_pb2.Status(code=code, message=clipped(str(error)), details=packed)
    return ((_DETAILS, status.SerializeToString()),)
