"""Spans of the gateway: one for each request, below it one for each sequence open at a peer.

`GatewaySpans.begin` decides whether a request is traced; if it is not, there is nothing to
call and nothing is made. All times are the gateway's own, monotonic.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from grpc import StatusCode

from common import attributes as names
from common.errors import TandemError
from common.telemetry import Span, Tracing
from common.types import FinishReason, Proposal, Verdict
from gateway.records import DEADLINE_MARGIN_SECONDS, RequestRecord
from gateway.types import GenerationRequest

_STOP_OR_LENGTH = {r.name.lower(): "stop" for r in FinishReason} | {"length": "length"}


class GatewaySpans:
    """Begins the spans of requests."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing

    def begin(
        self,
        rpc: str,
        request_id: str,
        metadata: Iterable[tuple[str, Any]],
        *,
        arrived_at: float,
        timeout_seconds: float | None,
    ) -> RequestSpans | None:
        """The spans of a request that is sampled; its caller's `traceparent` is honoured.

        rpc is the full name of the RPC, such as tandem.v1.GatewayService/Generate.
        """
        traceparent = next((str(v) for k, v in metadata if k == "traceparent"), "")
        root = self._tracing.begin(rpc, "SERVER", traceparent, arrived_at)
        if root is None:
            return None
        service, _, method = rpc.partition("/")
        root.put(names.REQUEST_ID, request_id)
        root.attributes |= {
            "rpc.system": "grpc",
            "rpc.service": service,
            "rpc.method": method,
            "gen_ai.provider.name": "tandem",
        }
        return RequestSpans(root, arrived_at, timeout_seconds)


@dataclass
class _Session:
    """A sequence that is, or was, open at a peer."""

    span: Span
    opened_at: float
    closed_at: float | None = None
    heard_at: float | None = None  # a target's last verdict
    wire_seconds: float | None = None
    num_drafted: int = 0
    serial: int = -1  # of the draft's chain
    told_at: dict[int, float] = field(default_factory=dict)  # by committed length, ascending

    def end(self, at: float | None = None) -> None:
        """Write it."""
        if self.wire_seconds is not None:
            self.span.put(names.WIRE, self.wire_seconds)
        self.span.end(at)


class RequestSpans:
    """The spans of one request."""

    def __init__(self, root: Span, arrived_at: float, timeout_seconds: float | None) -> None:
        self._root = root
        self._arrived_at = arrived_at
        self._deadline_at = None if timeout_seconds is None else arrived_at + timeout_seconds
        self._target: _Session | None = None
        self._draft: _Session | None = None
        self._heard_at: float | None = None  # last verdict
        self._at_targets_seconds = 0.0  # with those left, from open to last verdict

    @property
    def trace_id(self) -> str:
        """For logs and exemplars."""
        return self._root.trace_id

    def asked(self, chat: bool, model: str) -> None:
        """What the client asks for, before it has been checked."""
        self._root.attributes["gen_ai.operation.name"] = "chat" if chat else "text_completion"
        if model:
            self._root.attributes["gen_ai.request.model"] = model

    def accepted(self, request: GenerationRequest) -> None:
        """The request has been found good."""
        sampling = request.sampling
        seed = sampling.seed
        self._root.put(names.RULE, sampling.rule.name.lower())
        self._root.put(names.LOOKAHEAD, request.lookahead)
        self._root.attributes |= {
            "gen_ai.response.model": request.model.name,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": float(sampling.top_k),
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.seed": seed - 2**64 if seed >= 2**63 else seed,
            "gen_ai.usage.input_tokens": len(request.prompt),
        }

    # -- sequences at peers ------------------------------------------------------------

    def opened(
        self, peer: str, address: str, sequence_id: int, committed_len: int, reason: str
    ) -> str:
        """A sequence is sent to a target or a draft; returns the trace context to send.

        reason is `first` or one of `metric_table.REOPENS`.
        """
        now = time.monotonic()
        span = self._root.child(f"{peer}.session", "CLIENT", began_at=now)
        span.put(names.PEER, address)
        span.put(names.SEQUENCE_ID, sequence_id)
        span.put(names.REOPEN, reason)
        session = _Session(span, now)
        if peer == "target":
            self._target = session
        else:
            self._draft = session
            session.told_at[committed_len] = now
        return span.traceparent

    def committed(self, committed_len: int) -> None:
        """The draft is told of a verdict."""
        if self._draft is not None:
            self._draft.told_at[committed_len] = time.monotonic()

    def proposed(self, proposal: Proposal) -> None:
        """A proposal is relayed; the first of a chain measures the way to the draft and back."""
        session = self._draft
        if session is None:
            return
        session.num_drafted += len(proposal.token_ids)
        if proposal.chain_id.serial == session.serial:
            return
        session.serial = proposal.chain_id.serial
        told_at = session.told_at.get(proposal.base_len)
        if told_at is not None:
            session.wire_seconds = time.monotonic() - told_at - proposal.held_seconds
        while session.told_at and next(iter(session.told_at)) <= proposal.base_len:
            del session.told_at[next(iter(session.told_at))]

    def heard(self, verdict: Verdict) -> None:
        """The target has decided tokens."""
        now = time.monotonic()
        if self._heard_at is None:
            self._root.event("tandem.first_token", now)
        self._heard_at = now
        if self._target is not None:
            self._target.heard_at = now
            held = verdict.timing.held_seconds
            self._target.wire_seconds = now - self._target.opened_at - held

    def draft_gone(self, event: str = "", message: str = "") -> None:
        """The draft is lost, or does not serve the sequence."""
        session = self._draft
        if session is None or session.closed_at is not None:
            return
        self._draft = None
        if event:
            session.span.event(event)
        if message:
            session.span.fail(message)
        self._end_draft(session)

    def target_gone(self, event: str, message: str = "") -> None:
        """The sequence leaves its target and may go on at another; message: of a failure."""
        session, now = self._target, time.monotonic()
        if session is None:
            return
        self._target = None
        session.span.event(event)
        if message:
            session.span.fail(message)
        if session.heard_at is not None:
            self._at_targets_seconds += session.heard_at - session.opened_at
        session.end(now)

    def target_failed(self, message: str, event: str = "") -> None:
        """The target is lost, or has given the sequence up."""
        if self._target is not None:
            self._target.span.fail(message)
            if event:
                self._target.span.event(event)

    def closed(self) -> None:
        """Nothing more is wanted from the peers; may be called again."""
        now = time.monotonic()
        for session in (self._target, self._draft):
            if session is not None:
                session.closed_at = session.closed_at or now

    # -- the end -----------------------------------------------------------------------

    def recorded(self, record: RequestRecord) -> None:
        """The figures of the request, whatever its end."""
        root, spent, usage, timing = self._root, record.speculation, record.usage, record.timing
        for attribute, number in (
            (names.NUM_STEPS, spent.steps),
            (names.NUM_DRAFTED, spent.drafted),
            (names.NUM_TESTED, spent.tested),
            (names.NUM_ACCEPTED, spent.accepted),
            (names.NUM_STALE, spent.stale),
            (names.NUM_UNDRAFTED, spent.undrafted_steps),
            (names.NUM_DELIVERED, usage.delivered),
            (names.NUM_DISCARDED, usage.discarded),
        ):
            root.put(attribute, number)
        root.attributes["gen_ai.usage.output_tokens"] = usage.delivered + usage.discarded
        if self._heard_at is not None:
            root.put(names.QUEUE, timing.queue_seconds)
            root.put(names.PREFILL, timing.prefill_seconds)
            root.put(names.STEPS, timing.steps_seconds)
            root.put(names.WIRE, timing.wire_seconds)
        if record.ending in _STOP_OR_LENGTH:
            root.put(names.FINISH_REASON, record.ending)
            reasons = (_STOP_OR_LENGTH[record.ending],)
            root.attributes["gen_ai.response.finish_reasons"] = reasons

    def end(self, error: BaseException | None) -> None:
        """The last event was handed to grpc, or an error ended the request: write all spans."""
        now = time.monotonic()
        code, event = StatusCode.OK, ""
        if error is not None:
            code, event, message = self._told(error, now)
            self._root.fail(message)
        for session in (self._target, self._draft):
            if session is not None and event:
                session.span.event(event, session.closed_at)
        if event:
            self._root.event(event, now)
        if self._target is not None:
            self._target.end(self._target.closed_at)
        if self._draft is not None:
            self._end_draft(self._draft)
        self._root.attributes["rpc.grpc.status_code"] = code.value[0]
        if self._heard_at is not None:
            at_targets, target = self._at_targets_seconds, self._target
            if target is not None:
                at_targets += (target.heard_at or now) - target.opened_at
            self._root.put(names.GATEWAY, now - self._arrived_at - at_targets)
        self._root.end(now)

    def _told(self, error: BaseException, now: float) -> tuple[StatusCode, str, str]:
        """The status that the client gets, the event that stands for it, and words."""
        if isinstance(error, asyncio.CancelledError):
            deadline_at = self._deadline_at
            if deadline_at is not None and now >= deadline_at - DEADLINE_MARGIN_SECONDS:
                return StatusCode.DEADLINE_EXCEEDED, "tandem.deadline", "the caller's time is over"
            return StatusCode.CANCELLED, "tandem.cancelled", "the client is gone or has cancelled"
        if not isinstance(error, TandemError):
            return StatusCode.INTERNAL, "", "a fault of the gateway, see its log"
        events = {
            StatusCode.CANCELLED: "tandem.cancelled",
            StatusCode.DEADLINE_EXCEEDED: "tandem.deadline",
        }
        return error.code, events.get(error.code, ""), str(error)

    @staticmethod
    def _end_draft(session: _Session) -> None:
        session.span.put(names.NUM_DRAFTED, session.num_drafted)
        session.end(session.closed_at)
