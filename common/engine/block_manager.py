"""Which block of the KV cache belongs to which sequence.

PagedAttention (Kwon et al., Efficient Memory Management for Large Language Model Serving
with PagedAttention, SOSP 2023, section 4): a sequence's KV slots lie in blocks of fixed
size, found through its block table; at most one block of a sequence is partly filled.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from common.types import IntArray


@dataclass
class BlockTable:
    """One sequence's blocks, in order of position."""

    blocks: list[int] = field(default_factory=list)
    num_slots: int = 0  # slots in use; the table holds just the blocks that cover them


class BlockManager:
    """Allocates, truncates and frees; every change leaves a consistent state."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed is warm
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Slots of the whole cache: the longest sequence that can ever fit."""
        return self.num_blocks * self.block_size

    def open(self, sid: int) -> None:
        """A new sequence without slots."""
        assert sid not in self._tables, f"sequence {sid} is open already"
        self._tables[sid] = BlockTable()

    def missing_blocks(self, sid: int, num_slots: int) -> int:
        """How many blocks more a sequence needs to grow to num_slots."""
        return max(0, self._blocks_for(num_slots) - len(self._tables[sid].blocks))

    def reserve(self, sid: int, num_slots: int) -> bool:
        """Grow a sequence to num_slots slots; all or nothing. Never shrinks."""
        needed = self.missing_blocks(sid, num_slots)
        if needed > len(self._free):
            return False
        table = self._tables[sid]
        table.blocks += [self._free.pop() for _ in range(needed)]
        table.num_slots = max(table.num_slots, num_slots)
        return True

    def truncate(self, sid: int, num_slots: int) -> None:
        """Shrink a sequence to num_slots slots: how a rejected run is rolled back."""
        table = self._tables[sid]
        assert 0 <= num_slots <= table.num_slots
        while len(table.blocks) > self._blocks_for(num_slots):
            self._free.append(table.blocks.pop())
        table.num_slots = num_slots

    def free(self, sid: int) -> None:
        """Forget a sequence and take its blocks back."""
        self.truncate(sid, 0)
        del self._tables[sid]

    def table(self, sid: int) -> list[int]:
        """Physical block ids in order of position; not to be changed."""
        return self._tables[sid].blocks

    def slots(self, sid: int, start: int, stop: int) -> IntArray:
        """Physical slots of positions start to stop. [stop - start]"""
        table = self._tables[sid]
        assert stop <= table.num_slots
        positions = np.arange(start, stop)
        blocks = np.array(table.blocks, np.int64)[positions // self.block_size]
        return blocks * self.block_size + positions % self.block_size

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or in just one table that needs it."""
        used = [b for table in self._tables.values() for b in table.blocks]
        assert sorted(used + self._free) == list(range(self.num_blocks)), "block lost or doubled"
        for sid, table in self._tables.items():
            assert len(table.blocks) == self._blocks_for(table.num_slots), f"table of {sid} is off"

    def _blocks_for(self, num_slots: int) -> int:
        return -(-num_slots // self.block_size)
