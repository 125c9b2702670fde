"""Spans of the draft: one for each sequence, its prefill and every chain.

An `Observer` of the engine's host. What it tells was stamped by the engine's thread, by the
monotonic clock; what it adds is the trace context of each proposal's chain.

Spans of a sequence are written together, the sequence's own first: a draft may die at any
moment, and what it leaves is then a whole tree or nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from common import attributes as names
from common.telemetry import Span, Tracing
from common.types import OpenSequence, Prefill, Proposal, StepResult

MAX_ROUNDS = 512
"""Chains of one sequence that have a span of their own."""


@dataclass
class _Chain:
    span: Span | None  # None: beyond `MAX_ROUNDS`
    serial: int
    token_ids: list[int] = field(default_factory=list)
    drawn_at: float = 0.0  # monotonic, of its last token


@dataclass
class _Entry:
    span: Span
    ready_at: float  # monotonic, when it arrived, then when its prompt was read
    chain: _Chain | None = None
    num_chains: int = 0
    num_drafted: int = 0
    below: list[tuple[Span, float]] = field(default_factory=list)  # with the time of their end

    def end_chain(self) -> None:
        """Its last token has been drawn."""
        chain = self.chain
        if chain is not None and chain.span is not None:
            chain.span.put(names.NUM_TOKENS, len(chain.token_ids))
            chain.span.put(names.TOKEN_IDS, chain.token_ids)
            self.below.append((chain.span, chain.drawn_at))
        self.chain = None


class DraftSpans:
    """Follows the sequences whose requests are traced."""

    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._entries: dict[int, _Entry] = {}

    def opened(self, sequence: OpenSequence) -> None:
        """See `Observer`."""
        if not sequence.traceparent:
            return
        at = sequence.arrived_at
        span = self._tracing.begin("draft.sequence", "SERVER", sequence.traceparent, at)
        if span is not None:
            span.put(names.SEQUENCE_ID, sequence.sequence_id)
            self._entries[sequence.sequence_id] = _Entry(span, at)

    def stepped(self, result: StepResult) -> StepResult | None:
        """See `Observer`."""
        if not self._entries:
            return None
        for prefill in result.prefills:
            if entry := self._entries.get(prefill.sequence_id):
                _tell_prefill(entry, prefill)
        for refusal in result.refusals:
            if entry := self._entries.get(refusal.sequence_id):
                entry.span.fail(refusal.error.message)
        if not result.proposals:
            return None
        return replace(result, proposals=tuple(self._proposal(p, result) for p in result.proposals))

    def closed(self, sequence_id: int) -> None:
        """See `Observer`."""
        entry = self._entries.pop(sequence_id, None)
        if entry is None:
            return
        entry.end_chain()
        entry.span.put(names.NUM_DRAFTED, entry.num_drafted)
        entry.span.put(names.SUMMED, max(0, entry.num_chains - MAX_ROUNDS))
        entry.span.end()
        for span, at in entry.below:
            span.end(at)

    def _proposal(self, p: Proposal, result: StepResult) -> Proposal:
        entry = self._entries.get(p.sequence_id)
        if entry is None or result.info is None:
            return p
        chain = entry.chain
        if chain is None or chain.serial != p.chain_id.serial:
            entry.end_chain()
            chain = entry.chain = _begin_chain(entry, p, result)
        entry.num_drafted += len(p.token_ids)
        chain.token_ids += p.token_ids
        chain.drawn_at = result.info.ended
        return p if chain.span is None else replace(p, traceparent=chain.span.traceparent)


def _tell_prefill(entry: _Entry, prefill: Prefill) -> None:
    span = entry.span.child("draft.prefill", began_at=prefill.began)
    span.put(names.NUM_TOKENS, prefill.num_tokens)
    entry.below.append((span, prefill.ended))
    entry.ready_at = prefill.ended


def _begin_chain(entry: _Entry, p: Proposal, result: StepResult) -> _Chain:
    """A chain's first proposal: what came last to the draft is what caused it."""
    entry.num_chains += 1
    if entry.num_chains > MAX_ROUNDS:
        return _Chain(None, p.chain_id.serial)
    cause = result.causes[p.sequence_id]
    arrived_at = cause.arrived_at or entry.ready_at
    span = entry.span.child(
        "draft.propose", began_at=max(arrived_at, entry.ready_at), links=cause.traceparents
    )
    span.put(names.CHAIN_SERIAL, p.chain_id.serial)
    span.put(names.BASE_LEN, p.base_len)
    span.put(names.START, p.start)
    span.put(names.HELD, time.monotonic() - arrived_at)
    return _Chain(span, p.chain_id.serial)
