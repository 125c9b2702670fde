"""Hand-made traces: OTLP messages as the services would send them, by the registry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

from common import attributes as registry
from gateway.tracing.spans import Span, from_otlp

BEGAN_NS = 1_700_000_000_000_000_000
_KINDS = {
    "SERVER": trace_pb2.Span.SPAN_KIND_SERVER,
    "CLIENT": trace_pb2.Span.SPAN_KIND_CLIENT,
    "INTERNAL": trace_pb2.Span.SPAN_KIND_INTERNAL,
}
RPC = "tandem.v1.GatewayService/Generate"


def any_value(value: Any) -> AnyValue:
    kinds = {bool: "bool_value", int: "int_value", float: "double_value", str: "string_value"}
    if type(value) in kinds:
        return AnyValue(**{kinds[type(value)]: value})
    return AnyValue(array_value=ArrayValue(values=[any_value(v) for v in value]))


def pairs(attributes: Mapping[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=k, value=any_value(v)) for k, v in attributes.items()]


@dataclass
class TraceMaker:
    """Times are milliseconds since the request began."""

    number: int = 1
    spans: list[tuple[str, trace_pb2.Span]] = field(default_factory=list)  # with its service

    @property
    def trace_id(self) -> bytes:
        return self.number.to_bytes(16, "big")

    def add(
        self,
        service: str,
        name: str,
        begin: float,
        end: float,
        attributes: Mapping[str, Any],
        *,
        parent: bytes = b"",
        links: Iterable[bytes] = (),
        events: Sequence[tuple[str, float]] = (),
        error: str = "",
    ) -> bytes:
        known = registry.span(name, service)
        assert known is not None, (service, name)
        allowed = {a.name for a in known.attributes}
        assert set(attributes) <= allowed, set(attributes) - allowed
        span_id = (self.number * 100_000 + len(self.spans) + 1).to_bytes(8, "big")
        self.spans.append(
            (
                service,
                trace_pb2.Span(
                    trace_id=self.trace_id,
                    span_id=span_id,
                    parent_span_id=parent,
                    name=name,
                    kind=_KINDS[known.kind],
                    start_time_unix_nano=BEGAN_NS + round(begin * 1e6),
                    end_time_unix_nano=BEGAN_NS + round(end * 1e6),
                    attributes=pairs(attributes),
                    events=[
                        trace_pb2.Span.Event(name=n, time_unix_nano=BEGAN_NS + round(at * 1e6))
                        for n, at in events
                    ],
                    links=[trace_pb2.Span.Link(trace_id=self.trace_id, span_id=i) for i in links],
                    status=trace_pb2.Status(
                        code=(
                            trace_pb2.Status.STATUS_CODE_ERROR
                            if error
                            else trace_pb2.Status.STATUS_CODE_UNSET
                        ),
                        message=error,
                    ),
                ),
            )
        )
        return span_id

    def otlp(self, *services: str) -> list[trace_pb2.ResourceSpans]:
        """What the services export; all of them by default."""
        return [
            trace_pb2.ResourceSpans(
                resource=Resource(attributes=pairs({"service.name": f"tandem-{service}"})),
                scope_spans=[
                    trace_pb2.ScopeSpans(
                        scope=InstrumentationScope(name="tandem"),
                        spans=[s for owner, s in self.spans if owner == service],
                    )
                ],
            )
            for service in services or ("gateway", "target", "draft")
        ]

    def read(self, *services: str) -> list[Span]:
        return list(from_otlp(self.otlp(*services)))


@dataclass(frozen=True)
class Step:
    """One round: the guess that it consumed and what was decided."""

    guess: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def num_accepted(self) -> int:
        agree = [a == b for a, b in zip(self.guess, self.token_ids, strict=False)]
        return agree.index(False) if False in agree else len(agree)


def simple(
    steps: Sequence[Step],
    *,
    number: int = 1,
    num_prompt: int = 10,
    step_ms: float = 20.0,
    finish: str = "length",
    draft: bool = True,
    summed: int = 0,
    events: Sequence[tuple[str, float]] = (),
    error: str = "",
    request_id: str = "req-1",
    skew_ms: float = 0.0,
) -> TraceMaker:
    """Queue 2 ms, prefill 38 ms, then a step after another; each guess arrives 4 ms before.

    `skew_ms` is how far the target's clock is off; `summed` rounds of one accepted token each
    have no span.
    """
    t = TraceMaker(number)
    begin, length = 43.0, num_prompt
    end = begin + step_ms * (len(steps) + summed)
    tested = sum(len(s.guess) for s in steps) + summed
    accepted = sum(s.num_accepted for s in steps) + summed
    undrafted = sum(not s.guess for s in steps)
    sums = {
        "tandem.num_steps": len(steps) + summed,
        "tandem.num_tested": tested,
        "tandem.num_accepted": accepted,
        "tandem.num_stale": 1,
        "tandem.num_undrafted_steps": undrafted,
    }
    parts = {
        "tandem.queue_seconds": 0.002,
        "tandem.prefill_seconds": 0.038,
        "tandem.steps_seconds": step_ms * (len(steps) + summed) / 1e3,
    }
    decided = sum(len(s.token_ids) for s in steps) + summed
    root = t.add(
        "gateway",
        RPC,
        0,
        end + 3,
        {
            "tandem.request.id": request_id,
            "tandem.rule": "coupled",
            "tandem.lookahead": 8,
            "gen_ai.response.model": "tiny",
            "gen_ai.request.temperature": 0.7,
            "gen_ai.usage.input_tokens": num_prompt,
            "gen_ai.usage.output_tokens": decided,
            "tandem.num_delivered": decided,
            "tandem.num_discarded": 0,
            "tandem.num_drafted": tested + 1,
            "tandem.finish_reason": finish,
            "tandem.wire_seconds": 0.002,
            "tandem.gateway_seconds": 0.003,
            "rpc.system": "grpc",
            "rpc.service": RPC.partition("/")[0],
            "rpc.method": "Generate",
            "rpc.grpc.status_code": 0 if not error else 4,
            **sums,
            **parts,
        },
        events=[("tandem.first_token", 60.0), *events],
        error=error,
    )
    session = {"tandem.session.reason": "first", "tandem.wire_seconds": 0.002}
    held = t.add(
        "gateway",
        "target.session",
        1,
        end + 2,
        {"tandem.peer.address": "127.0.0.1:7071", "tandem.sequence.id": 1, **session},
        parent=root,
    )
    sequence = t.add(
        "target",
        "target.sequence",
        2 + skew_ms,
        end + 1 + skew_ms,
        {
            "tandem.sequence.id": 1,
            "tandem.num_cached": 4,
            "tandem.num_preemptions": 0,
            "tandem.finish_reason": finish,
            "tandem.num_rounds_summed": summed,
            **sums,
            **parts,
        },
        parent=held,
    )
    t.add(
        "target",
        "target.prefill",
        4 + skew_ms,
        42 + skew_ms,
        {"tandem.num_tokens": num_prompt - 4, "tandem.num_cached": 4},
        parent=sequence,
    )
    guesses = b""
    if draft:
        guesses = _draft_sequence(t, root, tested, end)
    cause = b""
    for i, step in enumerate(steps):
        at = begin + step_ms * i
        links = []
        if step.guess:
            links = [b"\xff" * 8]  # of a draft that has told nothing
            if draft:
                propose = {
                    "tandem.chain.serial": i,
                    "tandem.proposal.start": length,
                    "tandem.chain.base_len": length,
                    "tandem.num_tokens": len(step.guess),
                    "tandem.token_ids": step.guess,
                    "tandem.held_seconds": 0.003,
                }
                causes = [cause] if cause else []
                name = "draft.propose"
                links = [
                    t.add("draft", name, at - 8, at - 4, propose, parent=guesses, links=causes)
                ]
        cause = t.add(
            "target",
            "target.verify",
            at + skew_ms,
            at + step_ms - 1 + skew_ms,
            {
                "tandem.step.id": 100 + i,
                "tandem.step.batch_size": 1,
                "tandem.step.rows": 1 + len(step.guess),
                "tandem.committed_len": length,
                "tandem.num_tested": len(step.guess),
                "tandem.num_accepted": step.num_accepted,
                "tandem.num_stale": 0,
                "tandem.token_ids": step.token_ids,
                "tandem.proposal.wait_seconds": 0.004,
            },
            parent=sequence,
            links=links,
        )
        length += len(step.token_ids)
    return t


def _draft_sequence(t: TraceMaker, root: bytes, num_drafted: int, end: float) -> bytes:
    session = {"tandem.session.reason": "first", "tandem.wire_seconds": 0.001}
    held = t.add(
        "gateway",
        "draft.session",
        1,
        end + 1,
        {"tandem.peer.address": "127.0.0.1:7072", "tandem.sequence.id": 2, **session},
        parent=root,
    )
    told = {"tandem.sequence.id": 2, "tandem.num_rounds_summed": 0}
    return t.add(
        "draft", "draft.sequence", 2, end, told | {"tandem.num_drafted": num_drafted}, parent=held
    )


def drafted(num_steps: int) -> list[Step]:
    """Steps in turn: undrafted; two of two accepted and a bonus; one of three accepted."""
    kinds = (
        Step((), (65,)),
        Step((66, 67), (66, 67, 68)),
        Step((69, 70, 71), (69, 72)),
    )
    return [kinds[i % 3] for i in range(num_steps)]
