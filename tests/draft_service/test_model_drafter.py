"""The model drafter over a model that reads its own cache (`tests/recall.py`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.engine.block_manager import BlockManager
from common.errors import InvalidRequestError
from common.types import ChainId, Commit, OpenSequence, Proposal, SamplingParams
from draft_service.drafters.model import ModelDrafter
from tests.recall import BLOCK, CONTEXT, VOCAB, RecallModel, go_on, say


class House:
    """A drafter, its model and its blocks."""

    def __init__(self, num_blocks: int = 30, max_rows: int = 512) -> None:
        self.model = RecallModel(num_blocks * BLOCK)
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.drafter = ModelDrafter(self.model, self.blocks, max_rows=max_rows)

    def open(
        self, sid: int, *token_ids: int, lookahead: int = 3, max_tokens: int = 100, **changes: Any
    ) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.drafter.open(
            OpenSequence(sid, token_ids, len(token_ids), params, lookahead, **changes)
        )

    def run(self, max_steps: int = 100) -> dict[int, list[Proposal]]:
        """Steps until there is nothing to do, which must come."""
        found: dict[int, list[Proposal]] = {}
        for _ in range(max_steps):
            if not self.drafter.has_work():
                return found
            for p in self.drafter.step():
                found.setdefault(p.sequence_id, []).append(p)
            self.blocks.check_integrity()
        raise AssertionError(f"still at work after {max_steps} steps")


def _tokens(proposals: list[Proposal]) -> list[int]:
    return [t for p in proposals for t in p.token_ids]


def test_one_token_a_step_up_to_the_lookahead() -> None:
    house = House()
    house.open(1, 1, 2, 3)
    first, second, third = go_on([1, 2, 3], 3)
    chain = ChainId(0, 0)
    assert house.run()[1] == [
        Proposal(1, chain, 3, 3, (first,)),
        Proposal(1, chain, 3, 4, (second,)),
        Proposal(1, chain, 3, 5, (third,)),
    ]
    assert house.model.rows == [3, 1, 1]
    assert house.drafter.step() == []


def test_an_agreeing_commit_lets_the_chaingo_on() -> None:
    house = House()
    house.open(1, 1, 2, 3)
    house.run()
    text = go_on([1, 2, 3], 5)
    house.drafter.commit(Commit(1, 3, tuple(text[:2]), 3))
    found = house.run()[1]
    assert _tokens(found) == text[3:]
    assert {(p.chain_id.serial, p.base_len) for p in found} == {(0, 3)}
    assert house.model.rows == [3, 1, 1, 1, 1]


def test_a_disagreeing_commit_rolls_back_to_where_they_part() -> None:
    house = House()
    house.open(1, 1, 2, 3)
    house.run()
    (first,) = go_on([1, 2, 3], 1)
    other = (say([1, 2, 3, first]) + 1) % VOCAB
    house.drafter.commit(Commit(1, 3, (first, other), 3))
    assert len(house.blocks.table(1)) == 1  # four tokens hold, of five that were cached
    text = [1, 2, 3, first, other]
    found = house.run()[1]
    assert _tokens(found) == go_on(text, 3)
    assert {(p.chain_id.serial, p.base_len) for p in found} == {(1, 5)}
    assert house.model.rows == [3, 1, 1, 1, 1, 1]


def test_a_commit_past_the_tip_is_caught_up_with_in_one_pass() -> None:
    house = House()
    house.open(1, 1, 2, 3, lookahead=1)
    house.run()
    text = [1, 2, 3, *go_on([1, 2, 3], 1), 7, 8, 9]
    house.drafter.commit(Commit(1, 3, tuple(text[3:]), 2))
    found = house.run()[1]
    assert _tokens(found) == go_on(text, 2)
    assert {(p.chain_id.serial, p.base_len) for p in found} == {(1, 7)}
    assert house.model.rows == [3, 4, 1]


def test_prompts_are_read_in_chunks_and_rows_are_shared() -> None:
    house = House(max_rows=4)
    house.open(1, *range(10), lookahead=1)
    house.open(2, 5, 6, lookahead=1)
    found = house.run()
    assert house.model.rows == [4, 4, 4]
    assert _tokens(found[1]) == go_on(list(range(10)), 1)
    assert _tokens(found[2]) == go_on([5, 6], 1)


@pytest.mark.parametrize(("max_tokens", "num"), [(1, 0), (2, 1), (3, 2), (9, 3)])
def test_the_last_token_of_the_text_is_never_drafted(max_tokens: int, num: int) -> None:
    house = House()
    house.open(1, 1, 2, 3, max_tokens=max_tokens)
    assert len(_tokens(house.run().get(1, []))) == num


@pytest.mark.parametrize(("num_blocks", "limit"), [(30, CONTEXT), (6, 24)])
def test_it_stops_at_its_context_and_at_its_cache(num_blocks: int, limit: int) -> None:
    house = House(num_blocks)
    house.open(1, *range(limit - 2), lookahead=10)
    assert len(_tokens(house.run()[1])) == 2
    house.drafter.close(1)
    if limit < CONTEXT:
        house.open(2, *range(limit))
        assert house.run() == {}


def test_a_prompt_of_its_whole_context_is_refused() -> None:
    house = House()
    with pytest.raises(InvalidRequestError, match="the draft's context"):
        house.open(1, *range(CONTEXT))
    assert house.blocks.num_free == 30


def test_ids_outside_the_vocabulary_are_refused() -> None:
    house = House()
    with pytest.raises(InvalidRequestError):
        house.open(1, 1, VOCAB)
    assert house.drafter.status().num_running == 0
    house.open(1, 1, 2)  # nothing was kept of the first try
    with pytest.raises(InvalidRequestError):
        house.drafter.commit(Commit(1, 2, (VOCAB,), 3))
    house.drafter.close(1)
    assert house.blocks.num_free == 30


# -- short of blocks -------------------------------------------------------------------


def test_the_newest_pays_for_the_older() -> None:
    house = House(num_blocks=3)
    house.open(1, 1, 2, 3, lookahead=1)
    house.open(2, 5, 6, 7, 8, 9)
    assert sorted(house.run()) == [1, 2]
    assert house.blocks.num_free == 0
    house.drafter.commit(Commit(1, 3, (9, 9), 1))
    found = house.run()
    assert _tokens(found[1]) == go_on([1, 2, 3, 9, 9], 1)
    assert 2 not in house.blocks
    assert (house.drafter.status().num_running, house.drafter.status().num_free_blocks) == (2, 1)


def test_without_room_there_is_no_work_until_something_changes() -> None:
    house = House(num_blocks=3)
    house.open(1, *range(8), lookahead=1)
    house.run()
    house.open(2, 5, 6, 7, 8, 9)
    assert house.run() == {}
    assert not house.drafter.has_work()  # though a sequence wants tokens
    text = go_on(list(range(8)), 2)
    house.drafter.commit(Commit(1, 8, (text[0],), 1))
    assert _tokens(house.run()[1]) == text[1:]
    house.drafter.close(1)
    assert _tokens(house.run()[2]) == go_on([5, 6, 7, 8, 9], 3)


# -- prefix cache ----------------------------------------------------------------------


def test_a_second_sequence_reads_only_the_rest_of_its_prompt() -> None:
    house = House()
    house.open(1, *range(10), lookahead=1)
    house.run()
    house.open(2, *range(11), lookahead=1)
    house.open(3, *range(11), lookahead=1, cache_scope="another")
    found = house.run()
    assert house.model.rows == [10, 3 + 11]
    assert _tokens(found[2]) == _tokens(found[3]) == go_on(list(range(11)), 1)


def test_only_committed_tokens_are_found() -> None:
    """A chain that was drawn but not decided is no prefix for others."""
    house = House()
    house.open(1, *range(6), lookahead=8)
    chain = _tokens(house.run()[1])
    text = [*range(6), *chain]
    house.open(2, *text, lookahead=1)
    house.run()
    assert house.model.rows[-1] == len(text) - 4
    house.drafter.commit(Commit(1, 6, tuple(chain[:4]), 8))
    house.drafter.close(2)
    house.drafter.close(1)
    house.open(3, *text[:9], lookahead=1)
    house.run()
    assert house.model.rows[-1] == 1


def test_choices_of_one_prompt_wait_for_the_first_to_read_it() -> None:
    house = House(max_rows=6)
    house.open(1, *range(10), lookahead=1)
    for sid in (2, 3):
        house.open(sid, *range(10), lookahead=1, fork_of=1)
    found = house.run()
    assert house.model.rows == [6, 4, 2 + 2]
    assert [_tokens(found[sid]) for sid in (1, 2, 3)] == [go_on(list(range(10)), 1)] * 3


@pytest.mark.parametrize("lookahead", [0, 1])
def test_choices_do_not_wait_for_one_that_is_not_drafted_or_gone(lookahead: int) -> None:
    house = House(max_rows=6)
    house.open(1, *range(10), lookahead=lookahead)
    house.open(2, *range(10), lookahead=1, fork_of=1)
    house.drafter.step()
    if lookahead:
        house.drafter.close(1)
    assert _tokens(house.run()[2]) == go_on(list(range(10)), 1)


def test_ten_thousand_rollbacks_across_block_edges_leave_nothing_behind() -> None:
    """Eight sequences that begin alike, drafted 1 to 6 tokens ahead and always wrong somewhere."""
    house = House(num_blocks=40)
    rng = np.random.default_rng(5)
    texts: dict[int, list[int]] = {}
    num_rollbacks = num_found = 0
    sid = 0
    while num_rollbacks < 10_000:
        while len(texts) < 8:
            sid += 1
            texts[sid] = list(range(int(rng.integers(1, 14))))
            house.open(sid, *texts[sid], lookahead=int(rng.integers(1, 7)))
        proposals = house.run()
        num_found += house.drafter.status().num_cached_blocks
        for one, text in list(texts.items()):
            chain = _tokens(proposals.get(one, []))
            assert chain == go_on(text, len(chain))
            num = int(rng.integers(0, len(chain) + 1))
            decided = [*chain[:num], (say(text + chain[:num]) + 1) % VOCAB]
            if len(text) + len(decided) >= CONTEXT - 7:
                house.drafter.close(one)
                del texts[one]
                continue
            commit = Commit(one, len(text), tuple(decided), int(rng.integers(1, 7)))
            house.drafter.commit(commit)
            texts[one] = text + decided
            num_rollbacks += num < len(chain)
    for one in texts:
        house.drafter.close(one)
    house.blocks.check_integrity()
    status = house.drafter.status()
    assert status.num_free_blocks == 40
    assert 0 < status.num_cached_blocks <= 40
    assert num_found > 0


class Turn(NamedTuple):
    """Commits so many agreeing tokens and others after them; or ends, or begins."""

    sid: int
    num_agreeing: int
    others: list[int]
    lookahead: int
    closes: bool


TURNS = st.builds(
    Turn,
    st.integers(0, 3),
    st.integers(0, 4),
    st.lists(st.integers(0, VOCAB - 1), max_size=3),
    st.integers(0, 5),
    st.sampled_from([False, False, False, True]),
)


@given(st.lists(TURNS, max_size=25), st.integers(3, 12), st.integers(1, 8))
def test_whatever_happens_the_cache_holds_the_text(
    turns: list[Turn], num_blocks: int, max_rows: int
) -> None:
    """Every token drawn is what the model says of the whole text before it."""
    house = House(num_blocks, max_rows)
    committed: dict[int, list[int]] = {}
    chains: dict[int, list[int]] = {}
    for t in turns:
        if t.sid not in committed:
            committed[t.sid], chains[t.sid] = [t.sid, *t.others], []
            house.open(t.sid, *committed[t.sid], lookahead=t.lookahead)
        elif t.closes:
            house.drafter.close(t.sid)
            del committed[t.sid]
        elif decided := chains[t.sid][: t.num_agreeing] + t.others:
            before, chain = committed[t.sid], chains[t.sid]
            house.drafter.commit(Commit(t.sid, len(before), tuple(decided), t.lookahead))
            agrees = chain[: len(decided)] == decided
            committed[t.sid], chains[t.sid] = [*before, *decided], chain[len(decided) :] * agrees
        for sid, proposals in house.run().items():
            for p in proposals:
                text = committed[sid] + chains[sid]
                assert (p.start, list(p.token_ids)) == (len(text), [say(text)])
                chains[sid] += p.token_ids
    for sid in committed:
        house.drafter.close(sid)
    assert house.blocks.num_free == num_blocks
