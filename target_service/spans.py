"""Spans of the target: one for each sequence, its prefill and every verdict.

An `Observer` of the engine's host. What it tells was stamped by the engine's thread, by the
monotonic clock; what it adds is the trace context of each verdict's span.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common import attributes as names
from common.telemetry import Span, Tracing
from common.types import OpenSequence, StepInfo, StepResult, Verdict

MAX_ROUNDS = 512
"""Verdicts of one sequence that have a span of their own."""


@dataclass
class _Entry:
    span: Span
    num_tokens: int  # at open
    num_steps: int = 0
    num_tested: int = 0
    num_accepted: int = 0
    num_stale: int = 0
    num_undrafted: int = 0
    num_preemptions: int = 0
    steps_seconds: float = 0.0
    ended: bool = False  # by the target itself


class TargetSpans:
    """Follows the sequences whose requests are traced."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._entries: dict[int, _Entry] = {}

    def opened(self, sequence: OpenSequence) -> None:
        """See `Observer`."""
        if not sequence.traceparent:
            return
        at = sequence.arrived_at
        span = self._tracing.begin("target.sequence", "SERVER", sequence.traceparent, at)
        if span is not None:
            span.put(names.SEQUENCE_ID, sequence.sequence_id)
            self._entries[sequence.sequence_id] = _Entry(span, len(sequence.token_ids))

    def stepped(self, result: StepResult) -> StepResult | None:
        """See `Observer`."""
        info = result.info
        if not self._entries or (info is None and not result.verdicts):
            return None
        if info is not None:
            for sid in info.preempted:
                if entry := self._entries.get(sid):
                    entry.num_preemptions += 1
                    entry.span.event("tandem.preempted", info.began)
        verdicts = tuple(self._verdict(v, result) for v in result.verdicts)
        return replace(result, verdicts=verdicts)

    def closed(self, sequence_id: int) -> None:
        """See `Observer`."""
        entry = self._entries.pop(sequence_id, None)
        if entry is None:
            return
        span = entry.span
        if not entry.ended:
            span.event("tandem.closed")
        span.put(names.SUMMED, max(0, entry.num_steps - MAX_ROUNDS))
        span.put(names.NUM_STEPS, entry.num_steps)
        span.put(names.NUM_TESTED, entry.num_tested)
        span.put(names.NUM_ACCEPTED, entry.num_accepted)
        span.put(names.NUM_STALE, entry.num_stale)
        span.put(names.NUM_UNDRAFTED, entry.num_undrafted)
        span.put(names.NUM_PREEMPTIONS, entry.num_preemptions)
        if entry.num_steps:
            span.put(names.STEPS, entry.steps_seconds)
        span.end()

    def _verdict(self, v: Verdict, result: StepResult) -> Verdict:
        entry = self._entries.get(v.sequence_id)
        if entry is None:
            return v
        entry.ended = v.ended
        entry.num_stale += v.num_stale  # of a failure too, which decided nothing
        if v.error is not None:
            entry.span.fail(v.error.message)
        if v.finish_reason is not None:
            entry.span.put(names.FINISH_REASON, v.finish_reason.name.lower())
        if not v.token_ids or result.info is None:
            return v
        if entry.num_steps == 0:
            _tell_prefill(entry, v, result.info)
        entry.num_steps += 1
        entry.num_tested += v.num_tested
        entry.num_accepted += v.num_accepted
        entry.num_undrafted += v.num_tested == 0
        entry.steps_seconds += v.timing.step_seconds
        if entry.num_steps > MAX_ROUNDS:
            return v
        return replace(v, traceparent=_tell_verify(entry.span, v, result))


def _tell_prefill(entry: _Entry, v: Verdict, info: StepInfo) -> None:
    span, timing = entry.span, v.timing
    span.put(names.QUEUE, timing.queue_seconds)
    span.put(names.PREFILL, timing.prefill_seconds)
    span.put(names.NUM_CACHED, v.num_cached)
    began_at = info.ended - timing.prefill_seconds
    prefill = span.child("target.prefill", began_at=began_at)
    prefill.put(names.NUM_TOKENS, entry.num_tokens - v.num_cached)
    prefill.put(names.NUM_CACHED, v.num_cached)
    prefill.end(info.ended)


def _tell_verify(parent: Span, v: Verdict, result: StepResult) -> str:
    """Write the span of one verdict; returns its trace context."""
    info = result.info
    assert info is not None, "a verdict with tokens comes from a step"
    cause = result.causes.get(v.sequence_id)
    links = cause.traceparents if cause is not None else ()
    span = parent.child("target.verify", began_at=info.began, links=links)
    span.put(names.STEP_ID, info.step_id)
    span.put(names.BATCH_SIZE, info.num_sequences)
    span.put(names.ROWS, info.num_rows)
    span.put(names.COMMITTED_LEN, v.committed_len)
    span.put(names.NUM_TESTED, v.num_tested)
    span.put(names.NUM_ACCEPTED, v.num_accepted)
    span.put(names.NUM_STALE, v.num_stale)
    span.put(names.TOKEN_IDS, v.token_ids)
    span.put(names.TOLD_LOOKAHEAD, v.lookahead)
    if v.timing.waited_seconds:
        span.put(names.WAITED, v.timing.waited_seconds)
    if cause is not None and cause.arrived_at is not None:
        span.put(names.PROPOSAL_WAIT, max(0.0, info.began - cause.arrived_at))
    span.end(info.ended)
    return span.traceparent
