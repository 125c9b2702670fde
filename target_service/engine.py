"""The target's heart: drain, schedule, run, accept, commit.

One thread owns it; `submit` alone may be called from others. It knows neither gRPC nor
threads, so a test can drive it step by step and choose at which step a piece of a chain
arrives.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from common.engine.block_manager import BlockManager
from common.engine.noise import GumbelNoise, Noise
from common.engine.paged_model import LanguageModel
from common.errors import (
    CapacityError,
    InternalFaultError,
    TandemError,
    TimedOutError,
    sequence_error,
)
from common.types import (
    NONE_STALE,
    Cause,
    CloseSequence,
    EngineStatus,
    FinishReason,
    OpenSequence,
    Progress,
    Proposal,
    StaleCounts,
    StepInfo,
    StepResult,
    TargetEvent,
    Verdict,
    VerdictTiming,
)
from target_service.goodput import DraftPolicy, Fixed
from target_service.opening import check_open
from target_service.scheduler import Scheduler, SchedulerConfig, Work, shape_of
from target_service.sequence import Sequence, cause_of
from target_service.verify import Decision, batch_of, decide

PROGRESS_EVERY_SECONDS = 0.25


class TargetEngine:
    """Decides tokens in a continuous batching loop over a paged KV cache."""

    def __init__(
        self,
        model: LanguageModel,
        blocks: BlockManager,
        *,
        eos_token_ids: tuple[int, ...] = (),
        config: SchedulerConfig | None = None,
        noise: Noise | None = None,
        policy: DraftPolicy | None = None,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._eos = tuple(t for t in eos_token_ids if t < model.vocab_size)
        self._noise = noise or GumbelNoise()
        self.policy = policy or Fixed()
        self.scheduler = Scheduler(config or SchedulerConfig(), blocks, self.policy)
        self._inbox: deque[TargetEvent] = deque()  # filled by submit, on any thread
        self._deferred: list[TargetEvent] = []  # taken out in mid-step, for the next one
        self._sequences: dict[int, Sequence] = {}
        self._refused: list[Verdict] = []  # of this step's opens
        self._causes: dict[int, Cause] = {}  # of this step's verdicts
        self._step_id = 0
        self._num_ignored = 0
        self._progress_at = 0.0
        self._held_since: float | None = None  # the next step waits for draft tokens

    def submit(self, event: TargetEvent) -> None:
        """Put an event into the inbox; any thread."""
        self._inbox.append(event)

    def has_work(self) -> bool:
        """Whether a step now would do anything."""
        return bool(self._inbox or self._deferred or self._sequences)

    def num_live(self) -> int:
        """How many sequences are open."""
        return len(self._sequences)

    def hold_seconds(self) -> float:
        """How much longer the next step should wait for draft tokens; 0 or less: not at all.

        Only ever while one sequence has the engine for itself: nobody else is held up.
        """
        self._drain()
        now = time.monotonic()
        running = self.scheduler.running
        alone = len(running) == 1 and not self.scheduler.waiting and running[0].decoding
        seconds = self.policy.hold_until(running[0]) - now if alone else 0.0
        if seconds > 0 and self._held_since is None:
            self._held_since = now
        return seconds

    def step(self, before_pass: Callable[[], None] = lambda: None) -> StepResult:
        """One forward pass over whatever there is to do. See `Engine`."""
        began = time.monotonic()
        waited = began - (self._held_since or began)
        self._held_since = None
        self._drain()
        self._expire(time.monotonic())
        plan = self.scheduler.plan()
        verdicts, self._refused = self._refused, []
        info, self._causes = None, {}
        if plan:
            self._step_id += 1
            now = time.monotonic()
            for work in plan:
                if work.seq.started_at is None:
                    work.seq.started_at = now
            if copies := self._blocks.take_copies():
                self._model.copy_blocks(copies)
            batch = batch_of(plan, self._blocks, self._model.device)
            before_pass()
            output = self._model.forward(batch)
            self._drain_late_proposals()
            decisions = decide(plan, output, self._noise)
            now = time.monotonic()
            num_rows = sum(w.num_rows for w in plan)
            self.policy.ran(shape_of(plan), now - began)
            self._advance_prompts(plan)
            verdicts += self._commit(decisions, now, len(plan), waited)
            preempted = tuple(self.scheduler.preempted)
            found = self.scheduler.take_found()
            info = StepInfo(
                self._step_id, began, now - began, len(plan), num_rows, preempted, *found
            )
        return StepResult(
            info=info,
            verdicts=tuple(verdicts),
            progress=self._progress(began),
            causes=self._causes,
            status=self._status(),
        )

    # -- 1. drain ----------------------------------------------------------------------

    def _drain(self) -> None:
        events, self._deferred = self._deferred, []
        while self._inbox:
            events.append(self._inbox.popleft())
        for event in events:
            match event:
                case OpenSequence():
                    self._open(event)
                case Proposal():
                    self._offer(event)
                case CloseSequence():
                    self._close(event)

    def _drain_late_proposals(self) -> None:
        """What arrived while the pass was running; all but proposals waits for the next step."""
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Proposal) and event.sequence_id in self._sequences:
                self._offer(event)
            else:
                self._deferred.append(event)

    def _open(self, event: OpenSequence) -> None:
        try:
            check_open(event, self._model, self._eos, self._blocks.capacity)
            if self.scheduler.full and not event.resumed:
                raise CapacityError("the target's queue is full", retry_after_seconds=1.0)
        except TandemError as error:
            self._refused.append(_failure(event.sequence_id, len(event.token_ids), error))
            return
        arrived_at = event.arrived_at or time.monotonic()
        seq = Sequence.of(event, self._eos, self._model.context_len, arrived_at)
        seq.parent = self._sequences.get(event.fork_of)
        self._sequences[seq.sid] = seq
        self.scheduler.add(seq)

    def _offer(self, event: Proposal) -> None:
        if seq := self._sequences.get(event.sequence_id):
            seq.offer(event, self._model.vocab_size)
        else:
            self._num_ignored += 1

    def _close(self, event: CloseSequence) -> None:
        if seq := self._sequences.pop(event.sequence_id, None):
            self.scheduler.remove(seq)
        else:
            self._num_ignored += 1

    def _expire(self, now: float) -> None:
        """End what nobody waits for any more."""
        for seq in [s for s in self._sequences.values() if s.deadline <= now]:
            error = TimedOutError("the caller's time is over")
            self._refused.append(_failure(seq.sid, len(seq.tokens), error, seq.abandon()))
            del self._sequences[seq.sid]
            self.scheduler.remove(seq)

    # -- 5. commit ---------------------------------------------------------------------

    def _advance_prompts(self, plan: list[Work]) -> None:
        """Prompt rows that decide nothing are in the cache now, and that is all."""
        for work in plan:
            if not work.decides:
                work.seq.num_cached += work.num_rows
                self._blocks.register(work.seq.sid, work.seq.tokens)

    def _commit(
        self, decisions: list[Decision], now: float, batch_size: int, waited: float
    ) -> list[Verdict]:
        verdicts = []
        for d in decisions:
            self.policy.tested(d.work.seq, len(d.tested), d.num_accepted)
        self.policy.tell([d.work.seq for d in decisions])
        for decision in decisions:
            seq = decision.work.seq
            if decision.emitted:
                verdicts.append(self._commit_one(decision, now, batch_size, waited))
            else:
                error = InternalFaultError("the model and its sampler left no finite logits")
                verdicts.append(_failure(seq.sid, len(seq.tokens), error, seq.abandon()))
            if verdicts[-1].ended:
                del self._sequences[seq.sid]
                self.scheduler.remove(seq)
        return verdicts

    def _commit_one(
        self, decision: Decision, now: float, batch_size: int, waited: float
    ) -> Verdict:
        seq, committed_len = decision.work.seq, len(decision.work.seq.tokens)
        emitted, reason = _cut(seq, decision.emitted)
        tested = decision.tested[: len(emitted)]
        num_tested = len(tested)
        self._causes[seq.sid] = cause_of(tested)
        seq.num_tested += num_tested
        seq.settle(emitted)
        if reason is not None:
            seq.kill_chain("finished")
        seq.num_cached = len(seq.tokens) - 1
        self._blocks.truncate(seq.sid, seq.num_cached)
        self._blocks.register(seq.sid, seq.tokens)
        stale = seq.take_stale()
        num_preemptions, seq.num_preemptions = seq.num_preemptions, 0
        logprobs = decision.logprobs.first(len(emitted))
        num_found, seq.num_found = seq.num_found, 0
        return Verdict(
            sequence_id=seq.sid,
            committed_len=committed_len,
            num_tested=num_tested,
            num_accepted=min(decision.num_accepted, len(emitted)),
            token_ids=tuple(emitted),
            logprobs=logprobs.chosen,
            top_logprobs=logprobs.top,
            finish_reason=reason,
            lookahead=seq.told_lookahead,
            step_id=self._step_id,
            timing=_timing(seq, now, waited),
            num_stale=sum(stale),
            num_cached=num_found,
            stale=stale,
            batch_size=batch_size,
            num_preemptions=num_preemptions,
        )

    # -- what the engine says of itself ------------------------------------------------

    def _progress(self, now: float) -> tuple[Progress, ...]:
        if now - self._progress_at < PROGRESS_EVERY_SECONDS:
            return ()
        self._progress_at = now
        waiting = [Progress(s.sid, i + 1, 0) for i, s in enumerate(self.scheduler.waiting)]
        reading = [
            Progress(s.sid, 0, s.num_cached) for s in self.scheduler.running if not s.decoding
        ]
        return tuple(waiting + reading)

    def _status(self) -> EngineStatus:
        return EngineStatus(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_blocks=self._blocks.num_blocks,
            num_free_blocks=self._blocks.num_free,
            num_ignored=self._num_ignored,
            num_preemptions=self.scheduler.num_preemptions,
            num_cached_blocks=self._blocks.num_cached,
        )


def _cut(seq: Sequence, emitted: list[int]) -> tuple[list[int], FinishReason | None]:
    """What is left of decided tokens once a stop token or a limit has cut them, and why."""
    for i, token in enumerate(emitted):
        if token in seq.stop_ids:
            return emitted[: i + 1], FinishReason.STOP_TOKEN
        if len(seq.tokens) + i + 1 >= seq.max_len:
            return emitted[: i + 1], FinishReason.LENGTH
    return emitted, None


def _timing(seq: Sequence, now: float, waited: float) -> VerdictTiming:
    """Where the time went since the last decision, or since arrival; without a gap between."""
    before, seq.decided_at = seq.decided_at, now
    if before is not None:
        return VerdictTiming(step_seconds=now - before, waited_seconds=waited)
    started = now if seq.started_at is None else seq.started_at
    return VerdictTiming(started - seq.opened_at, now - started)


def _failure(
    sid: int, committed_len: int, error: TandemError, stale: StaleCounts = NONE_STALE
) -> Verdict:
    told = sequence_error(error)
    return Verdict(sid, committed_len, 0, 0, (), error=told, num_stale=sum(stale), stale=stale)
