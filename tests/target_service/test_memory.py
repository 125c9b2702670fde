"""What the target's engine makes of memory: prefixes found, prompts forked, blocks taken back.

On a model that reads its own cache (`tests/recall.py`), so a slot that holds another's tokens
shows in the text; its rows are counted.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.engine.block_manager import BlockManager
from common.types import CloseSequence, OpenSequence, SamplingParams, StepResult, Verdict
from target_service.engine import TargetEngine
from target_service.scheduler import SchedulerConfig
from tests.recall import BLOCK, VOCAB, RecallModel, go_on

PROMPT = tuple(i * i % VOCAB for i in range(26))  # six blocks and two tokens


def _open(sid: int, token_ids: tuple[int, ...] = PROMPT, **changes: Any) -> OpenSequence:
    """Greedy, of eight tokens; changes are fields of OpenSequence or of SamplingParams."""
    fields = set(OpenSequence.__dataclass_fields__)
    sampling = {k: v for k, v in changes.items() if k not in fields}
    others = {k: v for k, v in changes.items() if k in fields}
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})
    num = others.pop("num_prompt", len(token_ids))
    return OpenSequence(sid, token_ids, num, params, **others)


class House:
    """An engine driven by hand, checked after every step."""

    def __init__(self, num_blocks: int = 100, prefix_cache: bool = True, **limits: Any) -> None:
        self.now = 0.0
        self.model = RecallModel(num_blocks * BLOCK, context_len=200)
        self.blocks = BlockManager(num_blocks, BLOCK, prefix_cache=prefix_cache)
        self.engine = TargetEngine(self.model, self.blocks, config=SchedulerConfig(**limits))
        self.engine.scheduler._clock = lambda: self.now
        self.verdicts: dict[int, list[Verdict]] = {}
        self.sought = self.found = 0

    def step(self, *events: Any) -> StepResult:
        for event in events:
            self.engine.submit(event)
        result = self.engine.step()
        for v in result.verdicts:
            assert v.error is None
            self.verdicts.setdefault(v.sequence_id, []).append(v)
        if result.info:
            self.sought += result.info.num_sought
            self.found += result.info.num_found
        self.blocks.check_integrity()
        return result

    def finish(self, *events: Any, max_steps: int = 500) -> None:
        """Step until nothing is left; then every block is free."""
        self.step(*events)
        for _ in range(max_steps):
            if not self.engine.has_work():
                break
            self.step()
        assert not self.engine.has_work()
        assert self.blocks.num_free == self.blocks.num_blocks

    def text(self, sid: int) -> list[int]:
        return [t for v in self.verdicts[sid] for t in v.token_ids]

    @property
    def rows(self) -> int:
        """Of all passes."""
        return sum(self.model.rows)


# -- prefix cache ----------------------------------------------------------------------


def test_a_second_request_reads_only_the_rest_of_its_prompt() -> None:
    house = House()
    house.finish(_open(1))
    assert house.rows == 26 + 7
    house.finish(_open(2, (*PROMPT, 9, 9)))
    assert house.model.rows[8] == 4  # two tokens of the seventh block, and two more
    assert house.text(1) == go_on(PROMPT, 8)
    assert house.text(2) == go_on((*PROMPT, 9, 9), 8)
    assert [house.verdicts[sid][0].num_cached for sid in (1, 2)] == [0, 24]
    assert {v.num_cached for v in house.verdicts[2][1:]} == {0}
    assert (house.sought, house.found) == (26 + 28, 24)


def test_what_was_decided_is_found_as_well() -> None:
    """The next turn of a conversation: prompt, answer and a new question."""
    house = House()
    house.finish(_open(1))
    turn = (*PROMPT, *house.text(1), 3, 4, 5)
    house.finish(_open(2, turn))
    assert house.verdicts[2][0].num_cached == 32  # 33 tokens of the first were in the cache
    assert house.text(2) == go_on(turn, 8)


@pytest.mark.parametrize("num_blocks", [100, 16])
def test_scopes_do_not_share(num_blocks: int) -> None:
    house = House(num_blocks)
    house.finish(_open(1, cache_scope="alice"))
    house.finish(_open(2, cache_scope="bob"))
    house.finish(_open(3, cache_scope="bob"))
    assert [house.verdicts[sid][0].num_cached for sid in (1, 2, 3)] == [0, 0, 24]


def test_switched_off_nothing_is_found() -> None:
    house = House(prefix_cache=False)
    house.finish(_open(1))
    house.finish(_open(2))
    assert house.rows == 2 * (26 + 7)
    assert house.step().status.num_cached_blocks == 0


def test_a_prompt_under_way_is_found_chunk_by_chunk() -> None:
    house = House(max_rows=9)
    house.step(_open(1))
    house.step()
    house.finish(_open(2))
    assert house.verdicts[2][0].num_cached == 16
    assert house.text(1) == house.text(2) == go_on(PROMPT, 8)


def test_cached_blocks_are_free_and_give_way_under_pressure() -> None:
    house = House(12)
    house.finish(_open(1))
    status = house.step().status
    assert (status.num_free_blocks, status.num_cached_blocks) == (12, 8)
    other = tuple((7 * i + 1) % VOCAB for i in range(26))
    house.finish(_open(2, other))  # takes four blocks that hold nothing, then five of the first's
    assert house.engine.scheduler.num_preemptions == 0
    house.finish(_open(3))
    assert house.verdicts[3][0].num_cached == 12  # its beginning outlived its end
    assert house.text(3) == house.text(1) == go_on(PROMPT, 8)
    assert house.text(2) == go_on(other, 8)


def test_what_others_hold_needs_no_room() -> None:
    """Two of nine blocks each fit into twelve if six are the same."""
    house = House(12)
    house.step(_open(1, max_tokens=4))
    house.step(_open(2, max_tokens=4))
    assert len(house.engine.scheduler.running) == 2
    cold = House(12, prefix_cache=False)
    cold.step(_open(1, max_tokens=4))
    cold.step(_open(2, max_tokens=4))
    assert len(cold.engine.scheduler.running) == 1


def test_the_preempted_find_what_they_had_read() -> None:
    house = House(16, watermark=0.0)
    prompts = [tuple((s * i + i * i) % VOCAB for i in range(22)) for s in (1, 2)]
    house.finish(*(_open(s, p, max_tokens=20) for s, p in enumerate(prompts)))
    assert house.engine.scheduler.num_preemptions > 0
    assert house.found > 0
    for sid, prompt in enumerate(prompts):
        assert house.text(sid) == go_on(prompt, 20)
        assert house.verdicts[sid][0].num_cached == 0  # that is told of the first time only


# -- forks -----------------------------------------------------------------------------


def _choices(
    num: int, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 10
) -> list[OpenSequence]:
    return [
        _open(i, prompt, seed=i, fork_of=int(i > 1), temperature=4.0, max_tokens=max_tokens)
        for i in range(1, num + 1)
    ]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 2, 24, 25, 26, 27, 28])
@pytest.mark.parametrize("max_rows", [512, 7])
def test_choices_read_their_prompt_once_and_say_what_they_would_alone(
    length: int, max_rows: int, prefix_cache: bool
) -> None:
    prompt = (*PROMPT, 4, 4)[:length]
    alone = House(prefix_cache=False)
    for o in _choices(4, prompt):
        alone.finish(replace(o, fork_of=0))
    house = House(max_rows=max_rows, prefix_cache=prefix_cache)
    house.finish(*_choices(4, prompt))
    texts = [house.text(i) for i in range(1, 5)]
    assert texts == [alone.text(i) for i in range(1, 5)]
    assert len({tuple(t) for t in texts}) > 1
    # A row for every token that is decided, and the prompt's others once.
    assert house.rows == 4 * 10 + length - 1
    assert [house.verdicts[i][0].num_cached for i in (2, 3, 4)] == [length - 1] * 3
    assert bool(house.model.copies) == ((length - 1) % BLOCK > 0)


def test_a_fork_waits_without_being_in_the_way() -> None:
    house = House(max_rows=9)
    house.step(_open(1), _open(2, fork_of=1), _open(3, (5, 6)))
    assert [s.sid for s in house.engine.scheduler.running] == [1, 3]
    assert [s.sid for s in house.engine.scheduler.waiting] == [2]
    house.finish()
    assert house.text(2) == house.text(1) == go_on(PROMPT, 8)
    assert house.text(3) == go_on((5, 6), 8)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("end", ["closed", "failed", "preempted", "never there", "other prompt",
                                 "other scope", "itself"])  # fmt: skip
def test_a_fork_whose_parent_can_t_help_goes_its_own_way(end: str, prefix_cache: bool) -> None:
    house = House(16, max_rows=9, prefix_cache=prefix_cache)
    parent = {"never there": 7, "itself": 2}.get(end, 1)
    prompt = (9, *PROMPT[1:]) if end == "other prompt" else PROMPT
    house.step(_open(1, prompt), _open(2, fork_of=parent, cache_scope="x" * (end == "other scope")))
    seq = house.engine._sequences[1]
    if end == "closed":
        house.step(CloseSequence(1))
    elif end == "preempted":
        seq.priority = -1  # so that it does not come back first
        house.engine.scheduler._preempt(seq)
    elif end == "failed":
        house.engine._sequences.pop(1)
        house.engine.scheduler.remove(seq)
    else:
        house.step()
        assert 2 in house.blocks  # at once
    house.finish()
    assert house.text(2) == go_on(PROMPT, 8)
    assert house.model.copies == []


def test_a_fork_of_a_fork_and_forks_that_come_late() -> None:
    house = House()
    house.step(_open(1, max_tokens=6), _open(2, fork_of=1), _open(3, fork_of=2))
    house.step()
    house.step(_open(4, fork_of=1), _open(5, (*PROMPT, *go_on(PROMPT, 2)), num_prompt=26,
                                         fork_of=1, resumed=True))  # fmt: skip
    house.finish()
    for sid in (2, 3, 4):
        assert house.text(sid) == go_on(PROMPT, 8)
    assert house.text(5) == go_on(PROMPT, 8)[2:]
    assert house.model.rows[0] == 26
    assert house.rows == 26 + 5 + 3 * 8 + 7  # the resumed one reads a token more before its first


def test_choices_share_memory() -> None:
    """Four of nine blocks fit into twenty, since six are the same; not if they were alone."""
    house = House(20, watermark=0.0)
    house.finish(*_choices(4, max_tokens=7))
    assert house.engine.scheduler.num_preemptions == 0


OPENS = st.lists(
    st.tuples(
        st.integers(1, 30),  # of the prompt's tokens
        st.integers(0, 3),  # which sequence before it is its parent; 0: none
        st.integers(1, 12),  # max_tokens
        st.sampled_from(["", "", "a"]),
        st.integers(-1, 1),
        st.none() | st.integers(1, 8),  # steps until it is closed
    ),
    min_size=1, max_size=8,
)  # fmt: skip


@settings(max_examples=150)
@given(OPENS, st.integers(11, 24), st.integers(1, 40), st.integers(1, 4), st.booleans())
def test_whatever_is_shared_every_text_is_its_own(
    opens: list[tuple[int, int, int, str, int, int | None]],
    num_blocks: int,
    max_rows: int,
    max_running: int,
    prefix_cache: bool,
) -> None:
    """Any mixture of prompts, forks, scopes, priorities and closes, while memory is short."""
    text = (*PROMPT, 1, 2, 3, 4)
    house = House(num_blocks, prefix_cache, max_rows=max_rows, max_running=max_running)
    closes: dict[int, list[int]] = {}
    for sid, (length, back, max_tokens, scope, priority, closed) in enumerate(opens, start=1):
        o = _open(
            sid, text[:length], max_tokens=max_tokens, cache_scope=scope, priority=priority,
            fork_of=max(0, sid - back) if back else 0,
        )  # fmt: skip
        house.step(o, *(CloseSequence(c) for c in closes.pop(sid, ())))
        if closed:
            closes.setdefault(sid + closed, []).append(sid)
    house.finish(*(CloseSequence(c) for late in closes.values() for c in late))
    for sid, (length, _, max_tokens, *_, closed) in enumerate(opens, start=1):
        expected = go_on(text[:length], max_tokens)
        told = house.text(sid) if sid in house.verdicts else []
        assert told == expected[: len(told)]
        assert closed or told == expected
