"""Which block of the KV cache belongs to which sequences.

PagedAttention (Kwon et al., Efficient Memory Management for Large Language Model Serving
with PagedAttention, SOSP 2023, section 4): a sequence's KV slots lie in blocks of fixed
size, found through its block table; at most one block of a sequence is partly filled.

A block may be in several tables (section 4.4): of sequences that began alike, through the
prefix cache (`prefix_cache.py`), or that were forked. Shared blocks are never written: who would
write into one gets a copy of it first. A block that nobody holds is free, also while the prefix
cache still knows its contents; such blocks are given out last, the least recently used first.

What a shared block holds was computed in another batch. Where a model is row-invariant these are
the bits that the sequence would have computed itself, elsewhere they differ by rounding.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from common.engine.prefix_cache import PrefixCache, chained, root_of
from common.types import IntArray


@dataclass
class BlockTable:
    """One sequence's blocks, in order of position."""

    root: bytes  # its scope's, see `prefix_cache`
    blocks: list[int] = field(default_factory=list)
    num_slots: int = 0  # slots in use; the table holds just the blocks that cover them
    num_settled: int = 0  # slots that are not written any more; reserve lets write the others
    hashes: list[bytes] = field(default_factory=list)  # of its first blocks, as registered


class BlockManager:
    """Allocates, shares, truncates and frees; every change leaves a consistent state."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: the last freed is warm
        self._num_holders = [0] * num_blocks  # tables that a block is in
        self._tables: dict[int, BlockTable] = {}
        self._cache = PrefixCache()  # stays empty if it is switched off
        self._caching = prefix_cache
        self._copies: list[tuple[int, int]] = []  # (from, to), not performed yet

    @property
    def num_free(self) -> int:
        """Blocks that no sequence holds."""
        return len(self._free) + self._cache.num_idle

    @property
    def num_cached(self) -> int:
        """How many of the free blocks still hold a prefix."""
        return self._cache.num_idle

    @property
    def capacity(self) -> int:
        """Slots of the whole cache: the longest sequence that can ever fit."""
        return self.num_blocks * self.block_size

    def __contains__(self, sid: int) -> bool:
        return sid in self._tables

    def open(self, sid: int, token_ids: Sequence[int] = (), scope: str = "") -> int:
        """A new sequence; returns how many slots it has from the cache, filled.

        These are whole blocks of the first tokens, always fewer than all tokens. Only sequences
        of the same scope share blocks.
        """
        assert sid not in self._tables, f"sequence {sid} is open already"
        table = self._tables[sid] = BlockTable(root_of(scope))
        for hash_, block in self._matches(token_ids, table.root):
            self._hold(block)
            table.blocks.append(block)
            table.hashes.append(hash_)
        table.num_slots = table.num_settled = len(table.blocks) * self.block_size
        return table.num_slots

    def num_shareable(self, token_ids: Sequence[int], scope: str = "") -> int:
        """How many blocks `open` would share with sequences that hold them now."""
        matches = self._matches(token_ids, root_of(scope))
        return sum(self._num_holders[block] > 0 for _, block in matches)

    def fork(self, parent: int, child: int, num_slots: int) -> None:
        """A new sequence that shares the first slots of another, which must be filled."""
        assert child not in self._tables, f"sequence {child} is open already"
        source = self._tables[parent]
        assert 0 <= num_slots <= source.num_slots
        source.num_settled = source.num_slots
        blocks = source.blocks[: self.blocks_for(num_slots)]
        for block in blocks:
            self._hold(block)
        hashes = source.hashes[: num_slots // self.block_size]
        self._tables[child] = BlockTable(source.root, blocks, num_slots, num_slots, hashes)

    def missing_blocks(self, sid: int, num_slots: int) -> int:
        """How many blocks more a sequence needs to grow to num_slots."""
        table = self._tables[sid]
        grown = max(0, self.blocks_for(num_slots) - len(table.blocks))
        return grown + (num_slots > table.num_slots and self._shares_last(table))

    def reserve(self, sid: int, num_slots: int) -> bool:
        """Grow a sequence to num_slots slots; all or nothing. Never shrinks.

        The new slots may be written, once the copies have been performed (`take_copies`).
        """
        needed = self.missing_blocks(sid, num_slots)
        if needed > self.num_free:
            return False
        table = self._tables[sid]
        if num_slots <= table.num_slots:
            return True
        if table.num_slots % self.block_size:
            self._make_writable(table)
        num_blocks = self.blocks_for(num_slots)
        table.blocks += [self._allocate() for _ in range(num_blocks - len(table.blocks))]
        table.num_settled, table.num_slots = table.num_slots, num_slots
        return True

    def take_copies(self) -> list[tuple[int, int]]:
        """Blocks to copy, (from, to), one after the other, before the next pass writes any."""
        copies, self._copies = self._copies, []
        return copies

    def register(self, sid: int, committed: Sequence[int]) -> None:
        """Put full blocks of committed tokens into the prefix cache, once they are filled.

        Blocks whose contents another block has already stay the sequence's own.
        """
        table, size = self._tables[sid], self.block_size
        table.num_settled = table.num_slots
        num_full = min(len(committed), table.num_slots) // size if self._caching else 0
        for i in range(len(table.hashes), num_full):
            parent = table.hashes[-1] if table.hashes else table.root
            table.hashes.append(chained(parent, committed[i * size : (i + 1) * size]))
            self._cache.add(table.hashes[-1], table.blocks[i])

    def truncate(self, sid: int, num_slots: int) -> None:
        """Shrink a sequence to num_slots slots: how a rejected run is rolled back."""
        table = self._tables[sid]
        assert 0 <= num_slots <= table.num_slots
        while len(table.blocks) > self.blocks_for(num_slots):
            self._release(table.blocks.pop())
        table.num_slots = num_slots
        table.num_settled = min(table.num_settled, num_slots)
        del table.hashes[num_slots // self.block_size :]

    def free(self, sid: int) -> None:
        """Forget a sequence and take its blocks back, the last first: prefixes outlive them."""
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

    def blocks_for(self, num_slots: int) -> int:
        """How many blocks cover so many slots."""
        return -(-num_slots // self.block_size)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or in just the tables that need it.

        And no block may be written that another sequence or the prefix cache relies on.
        """
        held = Counter(b for table in self._tables.values() for b in table.blocks)
        idle = self._cache.idle
        assert sorted([*held, *self._free, *idle]) == list(range(self.num_blocks)), (
            "block lost or doubled"
        )
        assert [held[b] for b in range(self.num_blocks)] == self._num_holders, "holders miscounted"
        assert not any(b in self._cache for b in self._free), "a free block is cached"
        self._cache.check_integrity()
        for sid, table in self._tables.items():
            assert len(table.blocks) == self.blocks_for(table.num_slots), f"table of {sid} is off"
            assert len(set(table.blocks)) == len(table.blocks), f"table of {sid} holds one twice"
            if table.num_settled < table.num_slots:
                written = table.blocks[table.num_settled // self.block_size :]
                alone = all(held[b] == 1 and b not in self._cache for b in written)
                assert alone, f"sequence {sid} writes into a shared block"

    def _matches(self, token_ids: Sequence[int], root: bytes) -> Iterator[tuple[bytes, int]]:
        """Cached blocks of a text's first tokens, one token or more left out."""

        def hashes() -> Iterator[bytes]:
            parent, size = root, self.block_size
            for end in range(size, len(token_ids), size):
                parent = chained(parent, token_ids[end - size : end])
                yield parent

        return self._cache.matches(hashes())

    def _shares_last(self, table: BlockTable) -> bool:
        """Whether the block that the next slot lies in is partly filled and not its own."""
        if table.num_slots % self.block_size == 0:
            return False
        return self._num_holders[table.blocks[-1]] > 1

    def _make_writable(self, table: BlockTable) -> None:
        """Copy the last, partly filled block if it is shared; the cache must not rely on it."""
        if not self._shares_last(table):
            self._cache.drop(table.blocks[-1])
            return
        shared = table.blocks[-1]
        table.blocks[-1] = self._allocate()
        # In order, and before anything is written, even those are right whose blocks change hands.
        self._copies.append((shared, table.blocks[-1]))
        self._release(shared)

    def _allocate(self) -> int:
        block = self._free.pop() if self._free else self._cache.evict()
        self._num_holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if self._num_holders[block] == 0:
            self._cache.revive(block)
        self._num_holders[block] += 1

    def _release(self, block: int) -> None:
        self._num_holders[block] -= 1
        if self._num_holders[block]:
            return
        if block in self._cache:
            self._cache.retire(block)
        else:
            self._free.append(block)
