"""Which rows the next step runs. The target never waits: a step takes what has arrived."""

from __future__ import annotations

from dataclasses import dataclass, field

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
    def work(self) -> float:
        """Positions that the rows attend to, summed."""
        return self.num_rows * (self.seq.num_cached + self.num_rows)

    @property
    def rows(self) -> list[int]:
        """Token ids of the rows, in order."""
        first = self.seq.num_cached
        return self.seq.tokens[first : first + self.num_committed] + [d.token for d in self.run]


class Scheduler:
    """First come, first served within a priority; preempts by recomputation, newest first."""

    def __init__(
        self, config: SchedulerConfig, blocks: BlockManager, policy: DraftPolicy | None = None
    ) -> None:
        self._config = config
        self.policy: DraftPolicy = policy or Fixed()
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
