"""A stateful test: whatever the order of operations, no block is lost, doubled or idle.

And what a sequence reads is what belongs to its text: contents are followed slot by slot, so any
mistake in sharing shows as somebody else's tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from common.engine.block_manager import BlockManager
from common.engine.prefix_cache import chained, root_of

NUM_BLOCKS, SIZE = 12, 4
Content = tuple[str, tuple[int, ...]]  # scope and all tokens up to a position


class Growth(NamedTuple):
    """A sequence's part in a pass; `victim`: it is set back after its slots were reserved."""

    sid: int
    tokens: list[int]
    victim: bool
    num_committed: int


class Text:
    """What a sequence has written."""

    def __init__(self, scope: str, tokens: list[int]) -> None:
        self.scope, self.tokens = scope, tokens

    def contents(self) -> list[Content]:
        return [(self.scope, tuple(self.tokens[: i + 1])) for i in range(len(self.tokens))]


# Two tokens and two scopes only: so that sequences often begin alike.
TOKENS = st.lists(st.integers(0, 1), max_size=11)


class BlockManagerMachine(RuleBasedStateMachine):
    """Against a memory that holds in every slot what its position means."""

    sequences = Bundle("sequences")
    prefix_cache = True

    def __init__(self) -> None:
        super().__init__()
        self.manager = BlockManager(NUM_BLOCKS, SIZE, prefix_cache=self.prefix_cache)
        self.texts: dict[int, Text] = {}
        self.opened = 0
        self.memory: list[Content | None] = [None] * (NUM_BLOCKS * SIZE)
        self.meaning: dict[bytes, list[Content]] = {}  # of hashes: a block's contents

    @rule(target=sequences, prompt=TOKENS, scope=st.sampled_from(["", "a"]))
    def open(self, prompt: list[int], scope: str) -> int:
        self.opened += 1
        shareable = self.manager.num_shareable(prompt, scope)
        free = self.manager.num_free
        num = self.manager.open(self.opened, prompt, scope)
        assert num % SIZE == 0
        assert num < max(1, len(prompt))
        assert free - self.manager.num_free == num // SIZE - shareable
        self.texts[self.opened] = Text(scope, prompt[:num])
        return self.opened

    @rule(target=sequences, parent=sequences, data=st.data())
    def fork(self, parent: int, data: st.DataObject) -> int:
        self.opened += 1
        text = self.texts[parent]
        num = data.draw(st.integers(0, len(text.tokens)))
        free = self.manager.num_free
        self.manager.fork(parent, self.opened, num)
        assert self.manager.num_free == free
        self.texts[self.opened] = Text(text.scope, text.tokens[:num])
        return self.opened

    @rule(
        growths=st.lists(
            st.builds(Growth, sequences, TOKENS, st.booleans(), st.integers(0, 40)),
            min_size=1, max_size=4, unique_by=lambda g: g.sid,
        )
    )  # fmt: skip
    def run_a_pass(self, growths: list[Growth]) -> None:
        """Reserve for all, set some back, copy, write for the others, register."""
        taking_part = [g for g in growths if self._reserve(g)]
        for growth in [g for g in taking_part if g.victim]:
            self.manager.truncate(growth.sid, 0)
            self.texts[growth.sid].tokens = []
            taking_part.remove(growth)
        self.manager.check_integrity()
        for source, target in self.manager.take_copies():
            self.memory[target * SIZE : (target + 1) * SIZE] = self._block(source)
        for sid, tokens, *_ in taking_part:
            text = self.texts[sid]
            first = len(text.tokens)
            text.tokens = text.tokens + tokens
            slots = self.manager.slots(sid, first, len(text.tokens))
            for slot, content in zip(slots, text.contents()[first:], strict=True):
                self.memory[slot] = content
        for sid, *_, num_committed in taking_part:
            self._register(sid, num_committed)

    @rule(sid=sequences, data=st.data())
    def truncate(self, sid: int, data: st.DataObject) -> None:
        """Anywhere, also into blocks that others share or the cache knows."""
        text = self.texts[sid]
        text.tokens = text.tokens[: data.draw(st.integers(0, len(text.tokens)))]
        self.manager.truncate(sid, len(text.tokens))

    @rule(sid=consumes(sequences))
    def free(self, sid: int) -> None:
        self.manager.free(sid)
        del self.texts[sid]

    @invariant()
    def nothing_is_lost(self) -> None:
        self.manager.check_integrity()
        used = {b for sid in self.texts for b in self.manager.table(sid)}
        assert self.manager.num_free == NUM_BLOCKS - len(used)
        assert self.manager.num_cached <= self.manager.num_free
        assert self.prefix_cache or not self.manager.num_cached

    @invariant()
    def every_sequence_reads_its_own_text(self) -> None:
        for sid, text in self.texts.items():
            slots = self.manager.slots(sid, 0, len(text.tokens))
            assert [self.memory[slot] for slot in slots] == text.contents()

    @invariant()
    def cached_blocks_hold_what_they_are_known_for(self) -> None:
        for hash_, block in self.manager._cache._blocks.items():
            assert self._block(block) == self.meaning[hash_]

    def _reserve(self, growth: Growth) -> bool:
        length = len(self.texts[growth.sid].tokens) + len(growth.tokens)
        before, free = list(self.manager.table(growth.sid)), self.manager.num_free
        needed = self.manager.missing_blocks(growth.sid, length)
        assert self.manager.reserve(growth.sid, length) == (needed <= free)
        if needed > free:
            assert (self.manager.table(growth.sid), self.manager.num_free) == (before, free)
            return False
        assert self.manager.num_free == free - needed
        return True

    def _register(self, sid: int, num_committed: int) -> None:
        text = self.texts[sid]
        parent = root_of(text.scope)
        for end in range(SIZE, min(num_committed, len(text.tokens)) + 1, SIZE):
            parent = chained(parent, text.tokens[end - SIZE : end])
            self.meaning[parent] = text.contents()[end - SIZE : end]
        self.manager.register(sid, text.tokens[:num_committed])

    def _block(self, block: int) -> list[Content | None]:
        return self.memory[block * SIZE : (block + 1) * SIZE]


class WithoutCache(BlockManagerMachine):
    prefix_cache = False


BlockManagerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50)
WithoutCache.TestCase.settings = settings(max_examples=50, stateful_step_count=50)
TestBlockManager = BlockManagerMachine.TestCase
TestWithoutCache = WithoutCache.TestCase


def _filled(manager: BlockManager, sid: int, tokens: list[int], scope: str = "") -> int:
    """Open a sequence, let it write all its tokens and register them; returns what it found."""
    num = manager.open(sid, tokens, scope)
    assert manager.reserve(sid, len(tokens))
    manager.register(sid, tokens)
    manager.check_integrity()
    return num


def _count(num: int, first: int = 0) -> list[int]:
    return list(range(first, first + num))


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (30, 8)])
def test_a_hit_is_of_whole_blocks_and_leaves_a_token(length: int, found: int) -> None:
    manager = BlockManager(20, 4)
    _filled(manager, 1, _count(11))  # its third block is not full
    assert manager.open(2, _count(length)) == found
    assert manager.table(2) == manager.table(1)[: found // 4]


def test_scopes_share_nothing() -> None:
    manager = BlockManager(20, 4)
    _filled(manager, 1, _count(9), "alice")
    assert _filled(manager, 2, _count(9), "bob") == 0
    assert _filled(manager, 3, _count(9), "alice") == 8
    assert _filled(manager, 4, _count(9)) == 0


def test_only_what_is_committed_is_found() -> None:
    manager = BlockManager(20, 4)
    manager.open(1)
    manager.reserve(1, 12)
    manager.register(1, _count(7))  # the other slots hold draft tokens
    assert manager.open(2, _count(12)) == 4
    manager.register(1, _count(12))
    assert manager.open(3, _count(13)) == 12


def test_a_block_is_found_behind_the_same_blocks_only() -> None:
    manager = BlockManager(20, 4)
    _filled(manager, 1, [*_count(4), 7, 7, 7, 7])
    assert manager.open(2, [*_count(4, 1), 7, 7, 7, 7, 7]) == 0


def test_equal_blocks_are_cached_once() -> None:
    manager = BlockManager(20, 4)
    for sid in (1, 2):  # both before either has registered
        manager.open(sid, _count(8))
        manager.reserve(sid, 8)
    for sid in (1, 2):
        manager.register(sid, _count(8))
    assert not set(manager.table(1)) & set(manager.table(2))
    manager.free(2)
    assert (manager.num_free, manager.num_cached) == (18, 0)
    manager.free(1)
    assert (manager.num_free, manager.num_cached) == (20, 2)


def test_the_least_recently_used_goes_first_and_of_one_text_its_end() -> None:
    manager = BlockManager(6, 4)
    for sid, first in ((1, 0), (2, 100)):
        _filled(manager, sid, _count(12, first))
    manager.free(1)
    manager.free(2)
    assert manager.open(3, _count(9)) == 8  # the first text's beginning is used once more
    manager.free(3)
    manager.open(4)
    manager.reserve(4, 3 * 4)  # evicts 1's last block and the two last ones of 2
    manager.check_integrity()
    assert manager.open(5, _count(13)) == 8
    assert manager.open(6, _count(13, 100)) == 4


def test_blocks_without_a_prefix_are_given_out_first() -> None:
    manager = BlockManager(6, 4)
    _filled(manager, 1, _count(8))
    manager.free(1)
    manager.open(2)
    manager.reserve(2, 4 * 4)
    assert manager.num_cached == 2
    manager.reserve(2, 6 * 4)
    assert (manager.num_cached, manager.num_free) == (0, 0)


def test_a_fork_shares_all_and_copies_what_either_writes_first() -> None:
    manager = BlockManager(10, 4)
    _filled(manager, 1, _count(7))
    manager.fork(1, 2, 6)
    manager.fork(1, 3, 6)
    assert manager.table(2) == manager.table(3) == manager.table(1)
    assert manager.num_free == 8
    shared = manager.table(1)[1]
    assert manager.missing_blocks(1, 8) == 1
    assert manager.reserve(1, 8)
    assert manager.take_copies() == [(shared, manager.table(1)[1])]
    assert manager.reserve(2, 9)
    assert manager.take_copies() == [(shared, manager.table(2)[1])]
    assert manager.missing_blocks(3, 8) == 0  # the last one keeps the block
    assert manager.reserve(3, 8)
    assert manager.take_copies() == []
    assert manager.table(3)[1] == shared
    manager.check_integrity()


def test_a_copy_that_does_not_fit_changes_nothing() -> None:
    manager = BlockManager(3, 4)
    _filled(manager, 1, _count(6))
    manager.fork(1, 2, 5)
    assert manager.reserve(1, 8)
    manager.fork(1, 3, 7)
    assert not manager.reserve(1, 9)
    assert not manager.reserve(3, 8)
    assert len(manager.take_copies()) == 1
    manager.check_integrity()


def test_who_writes_into_its_own_cached_block_takes_it_out_of_the_cache() -> None:
    manager = BlockManager(10, 4)
    _filled(manager, 1, _count(8))
    manager.truncate(1, 6)
    assert manager.reserve(1, 8)
    assert manager.take_copies() == []
    manager.check_integrity()
    assert manager.open(2, _count(9)) == 4
    manager.register(1, _count(8))
    assert manager.open(3, _count(9)) == 8


def test_hashes_tell_scopes_and_blocks_apart() -> None:
    block = chained(root_of(""), [1, 2])
    assert block != chained(root_of("x"), [1, 2])
    assert block != chained(root_of(""), [2, 1])
    assert chained(block, [3]) != chained(root_of(""), [1, 2, 3])
    raw = chained(root_of(""), [])
    assert raw != root_of(root_of("").decode("latin-1"))


# -- the check itself ------------------------------------------------------------------


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


def test_integrity_check_sees_a_holder_too_few() -> None:
    manager = BlockManager(4, 2)
    _filled(manager, 1, _count(4))
    manager.fork(1, 2, 4)
    manager._num_holders[manager.table(1)[0]] -= 1
    with pytest.raises(AssertionError, match="holders miscounted"):
        manager.check_integrity()


def test_integrity_check_sees_a_write_into_a_shared_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_make_writable", lambda self, table: None)
    manager = BlockManager(4, 2)
    _filled(manager, 1, _count(3))
    manager.fork(1, 2, 3)
    manager.reserve(2, 4)
    with pytest.raises(AssertionError, match="2 writes into a shared block"):
        manager.check_integrity()


def test_integrity_check_sees_a_write_into_a_cached_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockManager, "_make_writable", lambda self, table: None)
    manager = BlockManager(4, 2)
    _filled(manager, 1, _count(4))
    manager.truncate(1, 3)
    manager.reserve(1, 4)
    with pytest.raises(AssertionError, match="1 writes into a shared block"):
        manager.check_integrity()
