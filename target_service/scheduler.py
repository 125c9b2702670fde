"""Which rows the next step runs. The target never waits: a step takes what has arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

from common.engine.block_manager import BlockManager
from target_service.sequence import Draft, Sequence


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of the queue."""

    max_running: int = 64  # sequences that take part in steps
    max_rows: int = 512  # rows of one step: decoding, drafted and prompt rows together
    max_waiting: int = 1024  # sequences in the queue


@dataclass
class Work:
    """The rows of one sequence in one step."""

    seq: Sequence
    num_committed: int  # rows of committed tokens that are not in the cache yet
    run: list[Draft] = field(default_factory=list)  # drafted rows to verify after them

    @property
    def decides(self) -> bool:
        """Whether the rows reach the end of the sequence."""
        return self.num_committed == self.seq.num_missing

    @property
    def num_rows(self) -> int:
        """All rows, drafted ones included."""
        return self.num_committed + len(self.run)

    @property
    def rows(self) -> list[int]:
        """Token ids of the rows, in order."""
        first = self.seq.num_cached
        return self.seq.tokens[first : first + self.num_committed] + [d.token for d in self.run]


class Scheduler:
    """First come, first served within a priority; preempts by recomputation, newest first."""

    def __init__(self, config: SchedulerConfig, blocks: BlockManager) -> None:
        self._config = config
        self._blocks = blocks
        self.waiting: list[Sequence] = []  # in order of admission
        self.running: list[Sequence] = []  # in order of admission
        self.num_preemptions = 0
        self.preempted: list[int] = []  # by the last plan

    @property
    def full(self) -> bool:
        """Whether the queue takes no more."""
        return len(self.waiting) >= self._config.max_waiting

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence behind those of its priority."""
        self._blocks.open(seq.sid)
        behind = (i for i, s in enumerate(self.waiting) if s.priority < seq.priority)
        self.waiting.insert(next(behind, len(self.waiting)), seq)

    def remove(self, seq: Sequence) -> None:
        """Forget a sequence and free its blocks."""
        (self.running if seq in self.running else self.waiting).remove(seq)
        self._blocks.free(seq.sid)

    def plan(self) -> list[Work]:
        """Rows for the next step, their slots reserved.

        Decoding sequences come first, then prompts, then what is left goes to drafted rows:
        a draft token never takes a block or a row that a sequence needs to move on.
        """
        self.preempted = []
        self._admit()
        budget = self._config.max_rows
        plan: dict[int, Work] = {}
        for seq in sorted(self.running, key=lambda s: not s.decoding):
            num = min(seq.num_missing, budget)
            if seq not in self.running or num == 0:  # it may have made room for an older one
                continue
            if self._make_room(seq, seq.num_cached + num, plan):
                plan[seq.sid] = Work(seq, num)
                budget -= num
        for work in plan.values():
            budget -= self._add_run(work, budget)
        return list(plan.values())

    def _admit(self) -> None:
        """Move sequences from the queue while the cache holds them whole, and a token more.

        A sequence alone always gets in: the engine has checked that the cache can hold it.
        """
        free = self._blocks.num_free - sum(
            self._blocks.missing_blocks(s.sid, len(s.tokens)) for s in self.running
        )
        while self.waiting and len(self.running) < self._config.max_running:
            head = self.waiting[0]
            needed = self._blocks.missing_blocks(head.sid, len(head.tokens) + 1)
            if needed > free and self.running:
                return
            free -= needed
            self.running.append(self.waiting.pop(0))

    def _make_room(self, seq: Sequence, num_slots: int, plan: dict[int, Work]) -> bool:
        """Reserve slots, preempting newer sequences if it must; False if seq itself had to go."""
        while not self._blocks.reserve(seq.sid, num_slots):
            # The newest of the lowest priority: min takes the first of equals.
            victim = min(reversed(self.running), key=lambda s: s.priority)
            self._preempt(victim)
            plan.pop(victim.sid, None)
            if victim is seq:
                return False
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Give a sequence's blocks back; it will recompute them, first in its queue."""
        self.running.remove(seq)
        self._blocks.truncate(seq.sid, 0)
        seq.num_cached = 0
        # Before its equals, where `add` puts a new one behind them.
        equal = (i for i, s in enumerate(self.waiting) if s.priority <= seq.priority)
        self.waiting.insert(next(equal, len(self.waiting)), seq)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(seq.sid)

    def _add_run(self, work: Work, budget: int) -> int:
        """Add as many drafted rows as budget and free blocks allow; returns their number."""
        seq = work.seq
        num = min(seq.run_len(), budget) if work.decides and seq.chain else 0
        while num and not self._blocks.reserve(seq.sid, len(seq.tokens) + num):
            num -= 1
        if num and seq.chain:
            work.run = seq.chain.drafts[:num]
            seq.num_in_pass = num
        return num
