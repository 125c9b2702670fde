"""Which rows a step runs, and who gives way when rows or blocks are short."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.block_manager import BlockManager
from common.types import ChainId, OpenSequence, Proposal, SamplingParams
from target_service.cost import Shape, StepCost
from target_service.goodput import DraftPolicy, Goodput, Objective
from target_service.scheduler import MIN_PROMPT_ROWS, Scheduler, SchedulerConfig, Work
from target_service.sequence import Sequence

BLOCK = 4


class House:
    """A scheduler, its blocks, and steps without a model: every decision is token 7."""

    def __init__(
        self,
        num_blocks: int = 100,
        policy: DraftPolicy | None = None,
        watermark: float = 0.0,
        **limits: Any,
    ) -> None:
        self.now = 100.0
        self.blocks = BlockManager(num_blocks, BLOCK)
        config = SchedulerConfig(watermark=watermark, **limits)
        self.scheduler = Scheduler(config, self.blocks, policy, lambda: self.now)

    def add(self, sid: int, length: int = 4, priority: int = 0, max_tokens: int = 50) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens)
        o = OpenSequence(sid, (7,) * length, length, params, lookahead=8, priority=priority)
        seq = Sequence.of(o, (), 1000, 0.0)
        self.scheduler.add(seq)
        return seq

    def step(self) -> list[Work]:
        plan = self.scheduler.plan()
        self.blocks.check_integrity()
        for work in plan:
            seq = work.seq
            assert len(self.blocks.table(seq.sid)) * BLOCK >= seq.num_cached + len(work.rows)
            if not work.decides:
                seq.num_cached += work.num_committed
                continue
            seq.settle([7] * (1 + len(work.run)))
            seq.num_cached = len(seq.tokens) - 1
            self.blocks.truncate(seq.sid, seq.num_cached)
        return plan

    def running(self) -> list[int]:
        return [s.sid for s in self.scheduler.running]

    def waiting(self) -> list[int]:
        return [s.sid for s in self.scheduler.waiting]


def _draft(seq: Sequence, num: int) -> None:
    num_tokens = len(seq.tokens)
    seq.offer(Proposal(seq.sid, ChainId(1, num_tokens), num_tokens, num_tokens, (7,) * num), 8)


def _rows(plan: list[Work]) -> dict[int, tuple[int, int]]:
    """Committed and drafted rows of each sequence."""
    return {w.seq.sid: (w.num_committed, len(w.run)) for w in plan}


def test_first_come_first_served_within_a_priority() -> None:
    house = House(max_running=3)
    for sid, priority in ((1, 0), (2, 0), (3, 5), (4, 5), (5, -1), (6, 9)):
        house.add(sid, priority=priority)
    assert house.waiting() == [6, 3, 4, 1, 2, 5]
    house.step()
    assert (house.running(), house.waiting()) == ([6, 3, 4], [1, 2, 5])


def test_the_queue_is_full_at_its_limit() -> None:
    house = House(max_waiting=2)
    house.add(1)
    assert not house.scheduler.full
    house.add(2)
    assert house.scheduler.full
    house.step()
    assert not house.scheduler.full


def test_admission_waits_for_blocks_of_the_whole_prompt_and_a_token_more() -> None:
    house = House(num_blocks=4)
    house.add(1, length=7)
    house.add(2, length=8)  # three blocks with the token more, two are left
    house.add(3, length=1)  # would fit, but does not overtake
    assert _rows(house.step()) == {1: (7, 0)}
    assert house.waiting() == [2, 3]
    house.scheduler.remove(house.scheduler.running[0])
    assert _rows(house.step()) == {2: (8, 0), 3: (1, 0)}


def test_admission_counts_what_a_running_prompt_will_still_need() -> None:
    house = House(num_blocks=4, max_rows=4)
    house.add(1, length=11)
    assert _rows(house.step()) == {1: (4, 0)}
    house.add(2, length=4)  # three blocks are free, but two of them are spoken for
    assert _rows(house.step()) == {1: (4, 0)}
    assert house.waiting() == [2]


def test_a_prompt_is_read_in_chunks_and_decoding_goes_first() -> None:
    house = House(max_rows=6)
    house.add(1, length=4)
    house.add(2, length=13)
    assert _rows(house.step()) == {1: (4, 0), 2: (2, 0)}
    assert _rows(house.step()) == {1: (1, 0), 2: (5, 0)}
    assert _rows(house.step()) == {1: (1, 0), 2: (5, 0)}
    assert _rows(house.step()) == {1: (1, 0), 2: (1, 0)}


def test_beside_decoding_a_prompt_gets_the_rows_that_fit_the_time_for_it() -> None:
    cost = StepCost(np.array([1, 2]), np.ones(2), prompt_row=0.001, position=0.0)
    policy = Goodput(cost, Objective.LATENCY)
    house = House(prefill_seconds=0.03, policy=policy)
    house.add(1, length=100)
    assert _rows(house.step()) == {1: (100, 0)}  # alone: as many as there are
    house.add(2, length=80)
    house.add(3, length=20)
    assert _rows(house.step()) == {1: (1, 0), 2: (30, 0)}
    assert _rows(house.step()) == {1: (1, 0), 2: (30, 0)}
    assert _rows(house.step()) == {1: (1, 0), 2: (20, 0), 3: (10, 0)}
    for _ in range(300):
        cost.observe(Shape(2, 1000), 100.0)  # a slow day: hardly anything fits
    house.add(4, length=80)
    assert _rows(house.step())[3] == (10, 0)
    assert _rows(house.step())[4] == (MIN_PROMPT_ROWS, 0)


def test_drafts_get_what_prompts_leave() -> None:
    house = House(max_rows=8)
    first = house.add(1, length=4)
    house.step()
    house.add(2, length=9)
    _draft(first, 5)
    assert _rows(house.step()) == {1: (1, 0), 2: (7, 0)}
    _draft(first, 6)
    assert _rows(house.step()) == {1: (1, 5), 2: (2, 0)}


def test_a_prompt_that_is_not_read_whole_takes_no_draft() -> None:
    house = House(max_rows=4)
    seq = house.add(1, length=6)
    _draft(seq, 3)
    assert _rows(house.step()) == {1: (4, 0)}
    assert _rows(house.step()) == {1: (2, 2)}


def test_a_draft_takes_free_blocks_only() -> None:
    house = House(num_blocks=4)
    first, second = house.add(1, length=6), house.add(2, length=6)
    assert house.step()
    _draft(first, 8)
    _draft(second, 8)
    # Two blocks each hold 8 slots; 7 are taken by the token to decide from.
    assert _rows(house.step()) == {1: (1, 1), 2: (1, 1)}
    assert house.scheduler.num_preemptions == 0


def test_drafted_rows_are_given_up_before_anyone_is_preempted() -> None:
    house = House(num_blocks=3)
    first = house.add(1, length=3)
    second = house.add(2, length=3)
    house.step()
    _draft(first, 8)
    # The first could fill its block's last slot and the free block, until the second moves on.
    assert _rows(house.step()) == {1: (1, 4), 2: (1, 0)}
    assert house.blocks.num_free == 0
    house.scheduler.remove(first)
    _draft(second, 8)
    assert _rows(house.step()) == {2: (1, 7)}
    assert house.scheduler.num_preemptions == 0


def test_the_newest_of_the_lowest_priority_is_preempted() -> None:
    house = House(num_blocks=4)
    for sid, priority in ((1, 1), (2, 0), (3, 0), (4, 1)):
        house.add(sid, length=3, priority=priority)
    house.step()
    assert house.running() == [1, 4, 2, 3]
    assert len(_rows(house.step())) == 4  # each block is full now
    assert _rows(house.step()) == {1: (1, 0), 4: (1, 0)}  # 3 gave way to 1, 2 to 4
    assert house.scheduler.num_preemptions == 2
    assert house.waiting() == [2, 3]


def test_a_sequence_may_be_preempted_that_was_planned_already() -> None:
    """The older one has its row when the newer, of higher priority, needs its blocks."""
    house = House(num_blocks=3)
    house.add(1, length=5)
    house.step()
    house.add(2, length=3, priority=1)
    assert _rows(house.step()) == {1: (1, 0), 2: (3, 0)}
    assert _rows(house.step()) == {1: (1, 0), 2: (1, 0)}
    assert _rows(house.step()) == {2: (1, 0)}
    assert (house.running(), house.waiting()) == ([2], [1])


def test_the_preempted_recompute_first_in_their_priority() -> None:
    house = House(num_blocks=2)
    house.add(1, length=3)
    second = house.add(2, length=3)
    house.add(3, length=3)
    house.add(4, length=3, priority=1)
    house.step()
    assert house.running() == [4, 1]
    house.step()
    house.step()
    assert (house.running(), house.waiting()) == ([4], [1, 2, 3])
    for seq in (*house.scheduler.running, house.scheduler.waiting[0]):
        house.scheduler.remove(seq)
    assert _rows(house.step()) == {2: (3, 0), 3: (3, 0)}
    house.step()
    house.step()
    assert (house.running(), house.waiting()) == ([2], [3])
    house.scheduler.remove(second)
    assert _rows(house.step()) == {3: (5, 0)}  # prompt and decided tokens, once more


def test_a_prompt_may_be_preempted_half_read() -> None:
    """It reads a token a step while the first, decoding, takes the block it would end in."""
    house = House(num_blocks=5, max_rows=2)
    house.add(1, length=4)
    for _ in range(3):
        house.step()
    second = house.add(2, length=11)
    while not house.scheduler.num_preemptions:
        num_read = second.num_cached
        assert house.step()
    assert 0 < num_read < 10
    assert (house.running(), house.waiting()) == ([1], [2])
    assert (second.num_cached, 2 in house.blocks) == (0, False)


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_removing_frees_the_blocks(where: str) -> None:
    house = House()
    seq = house.add(1, length=9)
    if where == "running":
        house.step()
        assert house.blocks.num_free == 97
    house.scheduler.remove(seq)
    assert house.blocks.num_free == 100
    assert house.scheduler.plan() == []


# -- admission by watermark ------------------------------------------------------------


@pytest.mark.parametrize(("length", "gets_in"), [(111, True), (112, False)])
def test_admission_leaves_the_watermark_and_a_block_for_each_that_runs(
    length: int, gets_in: bool
) -> None:
    """28 blocks: of 40 that are free, without ten, and without one for each of two."""
    house = House(num_blocks=100, watermark=0.1)
    house.add(1, length=39)  # ten blocks with the token more
    house.add(2, length=199)  # fifty
    house.step()
    house.add(3, length=length)
    house.step()
    assert house.running() == [1, 2] + [3] * gets_in


def test_a_sequence_alone_always_gets_in() -> None:
    house = House(num_blocks=10, watermark=0.5)
    house.add(1, length=40, max_tokens=1)
    house.add(2, length=1)
    assert _rows(house.step()) == {1: (40, 0)}
    assert house.waiting() == [2]


def test_with_a_watermark_nobody_is_preempted_right_after() -> None:
    """Every sequence grows by a block at least before one has to go."""
    house = House(num_blocks=12, watermark=0.01)
    for sid in range(12):
        house.add(sid, length=3)
    for _ in range(BLOCK):
        house.step()
        assert house.scheduler.num_preemptions == 0
    assert len(house.running()) == 6


# -- age -------------------------------------------------------------------------------


def test_who_waits_rises_and_who_rose_stays_there() -> None:
    house = House(max_running=1, age_seconds=10)
    first = house.add(1, priority=9)
    house.step()
    house.add(2, priority=0)
    house.add(3, priority=2)
    house.now += 15
    house.add(4, priority=2)  # 2 has risen by one, 3 as well
    assert house.waiting() == [3, 4, 2]
    house.now += 6  # 2 has risen by two
    house.add(5, priority=2)
    house.scheduler.remove(first)
    house.step()
    assert (house.running(), house.waiting()) == ([3], [2, 4, 5])


def test_without_age_priorities_stay_as_they_came() -> None:
    house = House(max_running=1, age_seconds=0)
    first = house.add(1)
    house.step()
    house.add(2, priority=0)
    house.now += 1e6
    house.add(3, priority=1)
    house.scheduler.remove(first)
    house.step()
    assert house.running() == [3]


@pytest.mark.parametrize("age_seconds", [0, 10])
def test_a_stream_of_high_priorities_starves_nobody(age_seconds: int) -> None:
    """New ones of priority 3 come faster than they are served; a step takes a second."""
    house = House(num_blocks=8, max_running=2, age_seconds=age_seconds, watermark=0.01)
    low = house.add(0, length=4, priority=0, max_tokens=20)
    for sid in range(1, 300):
        house.add(sid, length=12, priority=3, max_tokens=6)
        house.now += 1
        house.step()
        for seq in [s for s in house.scheduler.running if len(s.tokens) >= s.max_len]:
            house.scheduler.remove(seq)
    finished = low not in house.scheduler.running and low not in house.scheduler.waiting
    assert finished == (age_seconds > 0)


def test_who_was_preempted_is_not_the_newest_again() -> None:
    house = House(num_blocks=4)
    house.add(1, length=4)
    second = house.add(2, length=7)
    house.step()
    while not house.scheduler.num_preemptions:
        house.step()
    assert house.waiting() == [2]
    house.scheduler.remove(house.scheduler.running[0])
    house.step()
    house.add(3, length=3)
    house.step()
    assert house.running() == [2, 3]
    house.scheduler._preempt(second)
    house.step()
    assert house.running() == [2, 3]  # before the third, though admitted after it
    while house.scheduler.num_preemptions < 3:
        house.step()
    assert (house.running(), house.waiting()) == ([2], [3])


def test_the_age_of_a_victim_protects_it_as_well() -> None:
    """What a sequence gained while waiting holds when blocks run out."""
    house = House(num_blocks=2, max_running=2, age_seconds=10)
    first = house.add(1, length=2, priority=1)
    house.step()
    house.scheduler._config = SchedulerConfig(watermark=0.0, max_running=1, age_seconds=10)
    house.add(2, length=3, priority=0)
    house.now += 25
    house.step()
    assert house.waiting() == [2]
    house.scheduler._config = SchedulerConfig(watermark=0.0, max_running=2, age_seconds=10)
    house.step()
    assert house.running() == [1, 2]
    house.step()
    assert house.running() == [2]  # of priority 2 now, so the first made room for it
    assert house.waiting() == [1]
    assert first.num_preemptions == 1


LENGTHS = st.lists(
    st.tuples(st.integers(1, 20), st.integers(-1, 1), st.integers(0, 6)), min_size=1, max_size=8
)


@given(
    LENGTHS,
    st.integers(6, 12),
    st.integers(1, 12),
    st.integers(1, 4),
    st.sampled_from([0.0, 0.01, 0.5]),
    st.sampled_from([0.0, 1.0]),
)
def test_any_mixture_finishes(
    sequences: list[tuple[int, int, int]],
    num_blocks: int,
    max_rows: int,
    max_running: int,
    watermark: float,
    age_seconds: float,
) -> None:
    """All end, each step keeps to its limits, and somebody moves on in every step."""
    house = House(
        num_blocks,
        watermark=watermark,
        max_rows=max_rows,
        max_running=max_running,
        age_seconds=age_seconds,
    )
    live: set[Sequence] = set()
    coming = list(enumerate(sequences))
    for step in range(2000):
        if coming and step % 3 == 0:
            sid, (length, priority, _) = coming.pop()
            live.add(house.add(sid, length, priority, max_tokens=4))
        if not live:
            if coming:
                continue
            break
        for seq in live:
            _draft(seq, sequences[seq.sid][2])
        before = {s: len(s.tokens) + s.num_cached for s in live}
        house.now += 0.3
        plan = house.step()
        assert 0 < sum(len(w.rows) for w in plan) <= max_rows
        assert len(house.running()) <= max_running
        assert any(len(s.tokens) + s.num_cached > before[s] for s in live)
        for seq in [s for s in live if len(s.tokens) >= s.max_len]:
            assert len(seq.tokens) == seq.max_len
            house.scheduler.remove(seq)
            live.remove(seq)
    assert not live
    assert house.blocks.num_free == num_blocks
