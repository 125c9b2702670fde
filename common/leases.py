"""Which stream holds which sequence. The stream is the lease: when it ends, so do they.

On the wire a sequence id is unique within its stream; an engine sees ids unique within the
process. `Leases` translates between the two and routes what a step says to the stream that
holds the sequence. It belongs to the event loop's thread.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from common.outbox import Outbox
from common.types import (
    CloseSequence,
    Draining,
    Progress,
    Proposal,
    Refusal,
    StepResult,
    Verdict,
)


class Lease:
    """One stream and the sequences it carries."""

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self.outbox: Outbox[Any] = Outbox()
        self.engine_ids: dict[int, int] = {}  # wire id -> engine id
        self.said_at = 0.0  # monotonic, when it last heard the engine's status
        self.said_busy = False  # whether that status told of sequences

    def engine_id(self, wire_id: int) -> int:
        """The engine's id for a sequence of this stream; 0 if it carries none of that name."""
        return self.engine_ids.get(wire_id, 0) if wire_id else 0

    def submit(self, event: Any) -> None:
        """Pass an open, proposal, commit or close on to the engine."""
        self._leases.submit(self, event)


class _Holder(NamedTuple):
    """Who holds a sequence."""

    lease: Lease
    wire_id: int
    arrived_at: float  # monotonic, when it was opened


class Leases:
    """All streams of a service.

    `submit` is the engine's inbox; `forgotten` is told the engine's id of every sequence that
    no stream holds any more.
    """

    STATUS_EVERY_SECONDS = 0.5

    def __init__(
        self,
        submit: Callable[[Any], None],
        forgotten: Callable[[int], None] = lambda engine_id: None,
    ) -> None:
        self._submit = submit
        self._forgotten = forgotten
        self._ids = itertools.count(1)
        self._leases: set[Lease] = set()
        self._holders: dict[int, _Holder] = {}  # by engine id
        self.num_ignored = 0  # proposals, commits and closes for unknown ids

    def attach(self) -> Lease:
        """A new stream."""
        lease = Lease(self)
        self._leases.add(lease)
        return lease

    def detach(self, lease: Lease) -> None:
        """The stream has ended: close what it carried."""
        self._leases.discard(lease)
        lease.outbox.close()
        for engine_id in list(lease.engine_ids.values()):
            self._submit(CloseSequence(engine_id))
            self._forget(engine_id)

    def num_live(self) -> int:
        """How many sequences the streams carry."""
        return len(self._holders)

    def open(self, lease: Lease, wire_id: int, arrived_at: float = 0.0) -> int | None:
        """The engine's id for a new sequence, or None if the stream holds this one already."""
        if wire_id in lease.engine_ids:
            return None
        engine_id = next(self._ids)
        lease.engine_ids[wire_id] = engine_id
        self._holders[engine_id] = _Holder(lease, wire_id, arrived_at)
        return engine_id

    def submit(self, lease: Lease, event: Any) -> None:
        """Translate an event's id and hand it to the engine."""
        engine_id = lease.engine_ids.get(event.sequence_id)
        if engine_id is None:
            self.num_ignored += 1
            return
        if isinstance(event, CloseSequence):
            self._forget(engine_id)
            self._submit(CloseSequence(engine_id))
        else:
            self._submit(replace(event, sequence_id=engine_id, arrived_at=time.monotonic()))

    def deliver(self, result: StepResult) -> None:
        """Route what a step said; streams that hear nothing else hear the engine's status."""
        now = time.monotonic()
        for reply in self._replies(result):
            holder = self._holders.get(reply.sequence_id)
            if holder is None:  # closed in the meantime
                continue
            holder.lease.outbox.put(_addressed(reply, holder, result, now))
            if isinstance(reply, Refusal) or (isinstance(reply, Verdict) and reply.ended):
                self._forget(reply.sequence_id)
        status = replace(result.status, num_ignored=result.status.num_ignored + self.num_ignored)
        busy = status.num_running + status.num_waiting > 0
        for lease in self._leases:
            falls_idle = lease.said_busy and not busy
            if falls_idle or now - lease.said_at >= self.STATUS_EVERY_SECONDS:
                lease.said_at, lease.said_busy = now, busy
                lease.outbox.put(status)

    def announce(self, draining: Draining) -> None:
        """Tell every stream that the service is about to stop."""
        for lease in self._leases:
            lease.outbox.put(draining)

    def end(self) -> None:
        """End every stream after what is queued."""
        for lease in self._leases:
            lease.outbox.close()

    @staticmethod
    def _replies(result: StepResult) -> Iterator[Verdict | Proposal | Progress | Refusal]:
        yield from result.progress
        yield from result.verdicts
        yield from result.proposals
        yield from result.refusals

    def _forget(self, engine_id: int) -> None:
        holder = self._holders.pop(engine_id)
        del holder.lease.engine_ids[holder.wire_id]
        self._forgotten(engine_id)


def _addressed(reply: Any, holder: _Holder, result: StepResult, now: float) -> Any:
    """A reply under the stream's name for its sequence; says how long its cause was held."""
    if isinstance(reply, Verdict) and holder.arrived_at:
        held, told = now - holder.arrived_at, now - result.info.ended if result.info else 0.0
        timing = replace(reply.timing, held_seconds=held, told_seconds=told)
        return replace(reply, sequence_id=holder.wire_id, timing=timing)
    cause = result.causes.get(reply.sequence_id)
    if isinstance(reply, Proposal) and cause is not None and cause.arrived_at:
        held = now - cause.arrived_at
        return replace(reply, sequence_id=holder.wire_id, held_seconds=held)
    return replace(reply, sequence_id=holder.wire_id)
