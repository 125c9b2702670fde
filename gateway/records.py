"""What is known of a request: sums while it runs, a record once it has ended.

The gateway keeps the records of its last requests in a `Journal`, for `tandem explain`.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from common.errors import TandemError
from common.logs import fields
from common.types import NONE_STALE, ChainId, Rule, StaleCounts, Verdict
from gateway.types import GenerationTiming, SpeculationFigures, Usage

log = logging.getLogger(__name__)
DEADLINE_MARGIN_SECONDS = 0.01  # a server may notice a deadline that much before we do


@dataclass
class Tally:
    """The sums over a sequence's verdicts and proposals."""

    steps: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    stale: int = 0
    stale_counts: StaleCounts = NONE_STALE
    undrafted_steps: int = 0
    paused_steps: int = 0  # after which the draft was told to pause
    waited_seconds: float = 0.0  # that steps were held back for draft tokens
    cached: int = 0
    batch_sizes: int = 0  # summed over steps
    preemptions: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    steps_seconds: float = 0.0
    held_seconds: float = 0.0  # by targets, from arrival to sending the last verdict
    told_seconds: float = 0.0  # of that, after its decision
    _held_before: float = 0.0  # by targets that were left, like the next
    _told_before: float = 0.0

    def add(self, verdict: Verdict) -> None:
        """Count a verdict."""
        self.stale += verdict.num_stale
        if verdict.num_stale:
            pairs = zip(self.stale_counts, verdict.stale, strict=True)
            self.stale_counts = StaleCounts(*(a + b for a, b in pairs))
        self.cached = max(self.cached, verdict.num_cached)
        self.preemptions += verdict.num_preemptions
        self.queue_seconds += verdict.timing.queue_seconds
        self.prefill_seconds += verdict.timing.prefill_seconds
        self.steps_seconds += verdict.timing.step_seconds
        self.held_seconds = self._held_before + verdict.timing.held_seconds
        self.told_seconds = self._told_before + verdict.timing.told_seconds
        if not verdict.token_ids:
            return
        self.steps += 1
        self.batch_sizes += verdict.batch_size
        self.tested += verdict.num_tested
        self.accepted += verdict.num_accepted
        self.undrafted_steps += verdict.num_tested == 0
        self.paused_steps += verdict.lookahead == 0 and verdict.finish_reason is None
        self.waited_seconds += verdict.timing.waited_seconds
        missing = verdict.num_accepted - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position in range(verdict.num_accepted):
            self.accepted_per_position[position] += 1

    def moved(self) -> None:
        """The sequence leaves its target: what another one says is counted on top."""
        self._held_before, self._told_before = self.held_seconds, self.told_seconds

    def figures(self) -> SpeculationFigures:
        """What clients are told of drafting."""
        return SpeculationFigures(
            steps=self.steps,
            drafted=self.drafted,
            tested=self.tested,
            accepted=self.accepted,
            accepted_per_position=tuple(self.accepted_per_position),
            stale=self.stale,
            undrafted_steps=self.undrafted_steps,
        )


class DraftWatch:
    """How long a draft was at hand, how often and how fast it began a chain.

    Times are monotonic seconds of the gateway.
    """

    def __init__(self) -> None:
        self._attached_at: float | None = None
        self._attached_seconds = 0.0
        self._rejected: tuple[int, float] | None = None  # committed length then, and when
        self._turnarounds: list[float] = []
        self._chain: ChainId | None = None
        self.num_chains = 0

    def attached(self, now: float) -> None:
        """A draft hears of the sequence from now on."""
        self._attached_at = now

    def detached(self, now: float) -> None:
        """No draft hears of it any more."""
        if self._attached_at is not None:
            self._attached_seconds += now - self._attached_at
        self._attached_at = self._rejected = None

    def rejected(self, committed_len: int, now: float) -> None:
        """The draft is told that its chain is wrong."""
        self._rejected = committed_len, now

    def proposed(self, chain: ChainId, base_len: int, now: float) -> None:
        """A proposal has come; it answers a rejection if its chain begins there."""
        self.num_chains += chain != self._chain
        self._chain = chain
        if self._rejected is not None and base_len >= self._rejected[0]:
            self._turnarounds.append(now - self._rejected[1])
            self._rejected = None

    def attached_seconds(self, now: float) -> float:
        """How long a draft was at hand so far."""
        since = 0.0 if self._attached_at is None else now - self._attached_at
        return self._attached_seconds + since

    @property
    def turnaround_seconds(self) -> float | None:
        """From a rejection to the first token of the next chain, in the mean."""
        if not self._turnarounds:
            return None
        return sum(self._turnarounds) / len(self._turnarounds)


class TargetWatch:
    """When a request was told to targets, and when they spoke.

    Times are monotonic seconds of the gateway.
    """

    def __init__(self, arrived_at: float) -> None:
        self._opened_at = arrived_at  # at the present target
        self._heard_at: float | None = None  # its last verdict
        self._at_targets_seconds = 0.0  # with those left, from open to last verdict
        self._left_at: float | None = None  # the last word of a target that was left
        self._here = False  # whether there is a target
        self._arrived_at = arrived_at
        self.away_seconds = 0.0  # from the last word of a target until the next was told

    def opened(self, now: float) -> None:
        """A target is told."""
        if self._left_at is not None:
            self.away_seconds += now - self._left_at
        self._opened_at, self._heard_at, self._left_at, self._here = now, None, None, True

    def heard(self, now: float) -> None:
        """The target has sent a verdict."""
        self._heard_at = now

    def left(self) -> None:
        """The target is lost or left."""
        if self._heard_at is not None:
            self._at_targets_seconds += self._heard_at - self._opened_at
        self._left_at = self._heard_at or self._opened_at
        self._heard_at, self._here = None, False

    def timing(self, tally: Tally, now: float, first_token_at: float | None) -> GenerationTiming:
        """Where the time went so far; without a gap once the target has spoken."""
        at_targets, unknown = self._at_targets_seconds, 0.0
        if self._heard_at is not None:
            at_targets += self._heard_at - self._opened_at
        elif self._here:  # it has not said yet what it spent the time on
            unknown = now - self._opened_at
        total = now - self._arrived_at
        first = self._arrived_at if first_token_at is None else first_token_at
        return GenerationTiming(
            total_seconds=total,
            time_to_first_token_seconds=first - self._arrived_at,
            queue_seconds=tally.queue_seconds,
            prefill_seconds=tally.prefill_seconds,
            steps_seconds=tally.steps_seconds + tally.told_seconds,
            wire_seconds=at_targets - tally.held_seconds,
            gateway_seconds=total - at_targets - unknown,
        )


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """The figures of a request that has ended, or is about to."""

    request_id: str
    model: str
    ending: str  # one of metric_table.ENDINGS
    rule: Rule
    usage: Usage
    speculation: SpeculationFigures
    timing: GenerationTiming
    error: str = ""
    trace_id: str = ""  # of a sampled request
    stale: StaleCounts = NONE_STALE
    mean_batch_size: float = 0.0  # sequences in its steps; 0: not known
    num_preemptions: int = 0
    lookahead: int = 0  # 0: no drafting
    num_chains: int = 0  # that the draft began
    num_paused_steps: int = 0  # after which the draft was told to pause
    waited_seconds: float = 0.0  # that steps were held back for draft tokens
    num_moves: int = 0  # from one target to another, or back to the same
    away_seconds: float = 0.0  # from a left target's last word until the next was told
    has_draft: bool = False  # whether the gateway has one configured
    undrafted_seconds: float = 0.0  # without a draft at hand, though one was wanted
    draft_turnaround_seconds: float | None = None  # see DraftWatch
    draft_round_trip_seconds: float | None = None  # of the last heartbeat
    target_round_trip_seconds: float | None = None


def cut_off(error: TandemError | None, waited: float, timeout_seconds: float | None) -> str:
    """How a request ended that has no finish reason, one of `metric_table.ENDINGS`.

    waited is how many seconds it took; without an error the client has gone, or its time was
    over.
    """
    code = error.code.name if error else "CANCELLED"
    if code == "CANCELLED" and timeout_seconds is not None:
        late = waited >= timeout_seconds - DEADLINE_MARGIN_SECONDS
        code = "DEADLINE_EXCEEDED" if late else code
    return {"CANCELLED": "cancelled", "DEADLINE_EXCEEDED": "deadline"}.get(code, "error")


class Journal:
    """The last requests, by id; a later one of the same id takes the place of an earlier one."""

    def __init__(self, size: int = 1000) -> None:
        self._size = size
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()

    def add(self, record: RequestRecord, prompt: str = "") -> None:
        """Keep a record and log a line; prompt is text to log with it."""
        self._records.pop(record.request_id, None)
        self._records[record.request_id] = record
        if len(self._records) > self._size:
            self._records.popitem(last=False)
        spent, usage, timing = record.speculation, record.usage, record.timing
        log.info(
            "request ended",
            extra=fields(
                request_id=record.request_id,
                trace_id=record.trace_id,
                reason=record.ending,
                error=record.error,
                model=record.model,
                prompt_tokens=usage.prompt,
                tokens=usage.delivered,
                discarded=usage.discarded,
                acceptance=round(spent.accepted / spent.tested, 3) if spent.tested else None,
                seconds=round(timing.total_seconds, 4),
                first_token_seconds=round(timing.time_to_first_token_seconds, 4),
                prompt=prompt,
            ),
        )

    def get(self, request_id: str) -> RequestRecord | None:
        """The record of a request that is still remembered."""
        return self._records.get(request_id)
