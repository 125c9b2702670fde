"""A stateful test: whatever the order of operations, no block is lost, doubled or idle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.engine.block_manager import BlockManager


class BlockManagerMachine(RuleBasedStateMachine):
    """Against a model that only counts: sequence id -> number of slots."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(num_blocks=12, block_size=4)
        self.lengths: dict[int, int] = {}
        self.opened = 0
        # What each sequence wrote into its slots: (sid, position) must be read back.
        self.memory = np.full((48, 2), -1)

    @rule(target=sequences)
    def open(self) -> int:
        self.opened += 1
        self.manager.open(self.opened)
        self.lengths[self.opened] = 0
        return self.opened

    @rule(sid=sequences, num_slots=st.integers(0, 60))
    def reserve(self, sid: int, num_slots: int) -> None:
        before, free = self.lengths[sid], self.manager.num_free
        needed = max(0, -(-num_slots // 4) - -(-before // 4))
        assert self.manager.missing_blocks(sid, num_slots) == needed
        assert self.manager.reserve(sid, num_slots) == (needed <= free)
        if needed > free:
            assert self.manager.num_free == free
            return
        self.lengths[sid] = max(before, num_slots)
        for position in range(before, num_slots):
            (slot,) = self.manager.slots(sid, position, position + 1)
            self.memory[slot] = sid, position

    @rule(sid=sequences, data=st.data())
    def truncate(self, sid: int, data: st.DataObject) -> None:
        self.lengths[sid] = data.draw(st.integers(0, self.lengths[sid]))
        self.manager.truncate(sid, self.lengths[sid])

    @rule(sid=consumes(sequences))
    def free(self, sid: int) -> None:
        self.manager.free(sid)
        del self.lengths[sid]

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.manager.check_integrity()
        used = sum(-(-n // 4) for n in self.lengths.values())
        assert self.manager.num_free == 12 - used

    @invariant()
    def every_sequence_reads_what_it_wrote(self) -> None:
        for sid, length in self.lengths.items():
            slots = self.manager.slots(sid, 0, length)
            assert self.memory[slots].tolist() == [[sid, i] for i in range(length)]


BlockManagerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60)
TestBlockManager = BlockManagerMachine.TestCase


def test_integrity_check_sees_a_doubled_block() -> None:
    manager = BlockManager(4, 2)
    manager.open(1)
    manager.reserve(1, 4)
    manager.table(1)[0] = manager.table(1)[1]
    with pytest.raises(AssertionError, match="lost or doubled"):
        manager.check_integrity()


def test_integrity_check_sees_a_block_too_many() -> None:
    manager = BlockManager(4, 2)
    manager.open(1)
    manager.reserve(1, 4)
    manager._tables[1].num_slots = 1
    with pytest.raises(AssertionError, match="table of 1 is off"):
        manager.check_integrity()
