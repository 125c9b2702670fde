"""Which rows the next step runs. The target never waits: a step takes what has arrived."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

from common.engine.block_manager import BlockManager
from target_service.cost import Shape
from target_service.goodput import DraftPolicy, Fixed
from target_service.sequence import Draft, Sequence

MIN_PROMPT_ROWS = 16
"""A prompt gets on by so many rows in a step at least, however short the time for it."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of the queue."""

    max_running: int = 64  # sequences that take part in steps
    max_rows: int = 512  # rows of one step: decoding, drafted and prompt rows together
    max_waiting: int = 1024  # sequences in the queue
    prefill_seconds: float = 0.05  # what prompts may add to a step that others decode in
    watermark: float = 0.01  # part of the blocks that admission leaves free; see `_admit`
    age_seconds: float = 10.0  # of waiting, for which a priority rises by one; 0: never


@dataclass
class Work:
    """The rows of one sequence in one step."""

    seq: Sequence
    num_committed: int  # rows of committed tokens that are not in the cache yet
    run: list[Draft] = field(default_factory=list)  # drafted rows to verify after them
    decides: bool = field(init=False)  # whether the rows reach the end of the sequence

    def __post_init__(self) -> None:
        self.decides = self.num_committed == self.seq.num_missing

    @property
    def num_rows(self) -> int:
        """All rows, drafted ones included."""
        return self.num_committed + len(self.run)

    @property
    def work(self) -> float:
        """Positions that the rows attend to, summed."""
        return self.num_rows * (self.seq.num_cached + self.num_rows)

    @property
    def rows(self) -> list[int]:
        """Token ids of the rows, in order."""
        first = self.seq.num_cached
        return self.seq.tokens[first : first + self.num_committed] + [d.token for d in self.run]


class Scheduler:
    """First come, first served within a priority; preempts by recomputation, newest first.

    Nobody starves: a sequence's priority is the one that it came with, raised by one for every
    `age_seconds` that it has waited in all, so that in the end it is before any that come later.
    What it gained it keeps while it runs. And it is as old as when it was first admitted: who
    was preempted is not the newest again when it comes back.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        policy: DraftPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self.policy: DraftPolicy = policy or Fixed()
        self._blocks = blocks
        self._clock = clock
        self._seniorities = count()
        self._sought, self._found = 0, 0  # since `take_found`
        self.waiting: list[Sequence] = []  # in order of admission; these hold no blocks
        self.running: list[Sequence] = []  # in order of their first admission
        self.num_preemptions = 0
        self.preempted: list[int] = []  # by the last plan

    @property
    def full(self) -> bool:
        """Whether the queue takes no more."""
        return len(self.waiting) >= self._config.max_waiting

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind those of its priority."""
        if seq.parent is not None:
            seq.fork_len = seq.num_common(seq.parent)
        seq.queued_at = self._clock()
        insort(self.waiting, seq, key=self._turn)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        if seq in self.running:
            self.running.remove(seq)
            self._blocks.free(seq.sid)
        else:
            self.waiting.remove(seq)

    def take_found(self) -> tuple[int, int]:
        """Tokens of the sequences admitted since the last call, and how many need no reading."""
        taken = self._sought, self._found
        self._sought = self._found = 0
        return taken

    def plan(self) -> list[Work]:
        """Rows for the next step, their slots reserved.

        Decoding sequences come first, then prompts, then what is left goes to drafted rows:
        a draft token never takes a block or a row that a sequence needs to move on.
        """
        self.preempted = []
        self._admit()
        budget, prompt_budget = self._config.max_rows, self._prompt_budget()
        plan: dict[int, Work] = {}
        for seq in sorted(self.running, key=lambda s: not s.decoding):
            num = min(seq.num_missing, budget)
            if not seq.decoding:
                num = min(num, prompt_budget)
            if seq not in self.running or num == 0:  # it may have made room for an older one
                continue
            if self._make_room(seq, seq.num_cached + num, plan):
                plan[seq.sid] = Work(seq, num)
                budget -= num
                prompt_budget -= 0 if seq.decoding else num
        works = list(plan.values())
        self._add_runs(works, budget)
        return works

    def _prompt_budget(self) -> int:
        """Rows of prompts in the next step: while others decode, what fits the time for it."""
        reading = [s for s in self.running if not s.decoding]
        if not reading or len(reading) == len(self.running):
            return self._config.max_rows
        num = self.policy.num_prompt_rows(self._config.prefill_seconds, reading[0].num_cached)
        return max(MIN_PROMPT_ROWS, num)

    def _admit(self) -> None:
        """Move sequences from the queue while the cache holds them whole, and a token more.

        And a reserve, so that none has to be preempted right after: a part of all blocks (the
        watermark), and one for each running sequence to grow into. What is in the cache already
        counts where others hold it. A sequence alone always gets in: the engine has checked that
        the cache can hold it. A fork waits, without being in anybody's way, as long as its parent
        is about to read their prompt.
        """
        if not self.waiting or len(self.running) >= self._config.max_running:
            return
        blocks, watermark = self._blocks, self._config.watermark
        room = blocks.num_free - int(watermark * blocks.num_blocks)
        for s in self.running:
            room -= blocks.missing_blocks(s.sid, len(s.tokens)) + (watermark > 0)
        self.waiting.sort(key=self._turn)
        for seq in list(self.waiting):
            if len(self.running) >= self._config.max_running:
                return
            num_forked = self._num_forked(seq)
            if num_forked is None:
                continue
            if self.running and not self._fits(seq, num_forked, room):
                return
            free = blocks.num_free
            self._start(seq, num_forked)
            room -= free - blocks.num_free + (watermark > 0)
            room -= blocks.missing_blocks(seq.sid, len(seq.tokens) + 1)

    def _num_forked(self, seq: Sequence) -> int | None:
        """Slots to take over from the parent, 0 without one; None: later, it has yet to read."""
        parent = seq.parent
        if parent is None or not seq.fork_len:
            return 0
        if parent in self.running:
            return seq.fork_len if parent.num_cached >= seq.fork_len else None
        queued = parent.seniority is None and parent in self.waiting
        return None if queued else 0  # ended or preempted: it goes its own way

    def _fits(self, seq: Sequence, num_forked: int, room: int) -> bool:
        needed = self._blocks.blocks_for(len(seq.tokens) + 1)
        if num_forked:
            return needed - num_forked // self._blocks.block_size <= room
        return needed <= room or (
            needed - self._blocks.num_shareable(seq.tokens, seq.cache_scope) <= room
        )

    def _start(self, seq: Sequence, num_forked: int) -> None:
        """Let a sequence run, with what of its tokens is in the cache already."""
        self.waiting.remove(seq)
        if num_forked and seq.parent is not None:
            self._blocks.fork(seq.parent.sid, seq.sid, num_forked)
            seq.num_cached = num_forked
        else:
            seq.num_cached = self._blocks.open(seq.sid, seq.tokens, seq.cache_scope)
        seq.parent = None
        self._sought += len(seq.tokens)
        self._found += seq.num_cached
        if seq.seniority is None:
            seq.seniority = next(self._seniorities)
            seq.num_found = min(seq.num_cached, seq.num_prompt)
        seq.waited_seconds, seq.queued_at = self._waited(seq), None
        insort(self.running, seq, key=_seniority)

    def _waited(self, seq: Sequence) -> float:
        """Seconds in the queue, all in all."""
        waiting = 0.0 if seq.queued_at is None else self._clock() - seq.queued_at
        return seq.waited_seconds + waiting

    def _priority(self, seq: Sequence) -> int:
        """A sequence's priority, raised by its age."""
        age = self._config.age_seconds
        return seq.priority + (int(self._waited(seq) / age) if age else 0)

    def _turn(self, seq: Sequence) -> tuple[int, float, float]:
        """Sorts the queue; those that have run before come first among equals."""
        seniority = float("inf") if seq.seniority is None else seq.seniority
        return -self._priority(seq), seniority, seq.queued_at or 0.0

    def _make_room(self, seq: Sequence, num_slots: int, plan: dict[int, Work]) -> bool:
        """Reserve slots, preempting newer sequences if it must; False if seq itself had to go."""
        while not self._blocks.reserve(seq.sid, num_slots):
            # The newest of the lowest priority: min takes the first of equals.
            victim = min(reversed(self.running), key=self._priority)
            self._preempt(victim)
            plan.pop(victim.sid, None)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Give a sequence's blocks back; it will recompute them, first in its queue."""
        self.running.remove(seq)
        self._blocks.free(seq.sid)
        seq.num_cached = 0
        seq.queued_at = self._clock()
        insort(self.waiting, seq, key=self._turn)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(seq.sid)

    def _add_runs(self, works: list[Work], budget: int) -> None:
        """Add the drafted rows that the policy wants, as budget and free blocks allow."""
        deciding = [w for w in works if w.decides]
        nums = self.policy.runs([w.seq for w in deciding], shape_of(works))
        for work, wanted in zip(deciding, nums.tolist(), strict=True):
            seq, num = work.seq, min(wanted, budget)
            while num and not self._blocks.reserve(seq.sid, len(seq.tokens) + num):
                num -= 1
            if num and seq.chain:
                work.run = seq.chain.drafts[:num]
                seq.num_in_pass = num
                budget -= num


def shape_of(works: list[Work]) -> Shape:
    """What the cost of a step depends on."""
    num_logits = sum(1 + len(w.run) for w in works if w.decides)
    num_rows = sum(w.num_rows for w in works)
    return Shape(num_logits, num_rows - num_logits, sum(w.work for w in works))


def _seniority(seq: Sequence) -> int:
    assert seq.seniority is not None, "set when it was admitted"
    return seq.seniority
