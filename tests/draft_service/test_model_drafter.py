"""The model drafter over a model that reads its own cache.

`RecallModel` keeps token ids where others keep keys and values, and what it says next is a
function of all of them: a slot that was not filled, or not rolled back, changes its text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from common.engine.batch import RaggedBatch
from common.engine.block_manager import BlockManager
from common.errors import InvalidRequestError
from common.types import ChainId, Commit, OpenSequence, Proposal, SamplingParams
from draft_service.drafters.model import ModelDrafter

VOCAB, CONTEXT, BLOCK = 50, 40, 4


def say(tokens: list[int]) -> int:
    """What follows a text."""
    return sum((i + 1) * (t + 3) for i, t in enumerate(tokens)) % VOCAB


def _go_on(tokens: list[int], num: int) -> list[int]:
    text = list(tokens)
    for _ in range(num):
        text.append(say(text))
    return text[len(tokens) :]


class RecallModel:
    """Says what `say` says of the tokens in the cache; remembers the size of its passes."""

    vocab_size, context_len, device = VOCAB, CONTEXT, torch.device("cpu")

    def __init__(self, num_slots: int) -> None:
        self._cache = torch.full((num_slots,), -1)
        self.rows: list[int] = []

    def forward(self, batch: RaggedBatch) -> Tensor:
        self.rows.append(len(batch.token_ids))
        self._cache[batch.slots] = batch.token_ids
        owner = np.searchsorted(batch.query_start, batch.logit_rows.numpy(), side="right") - 1
        logits = torch.zeros(len(owner), VOCAB)
        for row, s, position in zip(
            logits, owner, batch.positions[batch.logit_rows].tolist(), strict=True
        ):
            row[say(self._cache[batch.context_slots[s][: position + 1]].tolist())] = 9.0
        return logits

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self._cache.view(-1, BLOCK)
        for source, target in copies:
            blocks[target] = blocks[source]


class House:
    """A drafter, its model and its blocks."""

    def __init__(self, num_blocks: int = 30, max_rows: int = 512) -> None:
        self.model = RecallModel(num_blocks * BLOCK)
        self.blocks = BlockManager(num_blocks, BLOCK)
        self.drafter = ModelDrafter(self.model, self.blocks, max_rows=max_rows)

    def open(self, sid: int, *token_ids: int, lookahead: int = 3, max_tokens: int = 100) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.drafter.open(OpenSequence(sid, token_ids, len(token_ids), params, lookahead))

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
    first, second, third = _go_on([1, 2, 3], 3)
    chain = ChainId(0, 0)
    assert house.run()[1] == [
        Proposal(1, chain, 3, 3, (first,)),
        Proposal(1, chain, 3, 4, (second,)),
        Proposal(1, chain, 3, 5, (third,)),
    ]
    assert house.model.rows == [3, 1, 1]
    assert house.drafter.step() == []


def test_an_agreeing_commit_lets_the_chain_go_on() -> None:
    house = House()
    house.open(1, 1, 2, 3)
    house.run()
    text = _go_on([1, 2, 3], 5)
    house.drafter.commit(Commit(1, 3, tuple(text[:2]), 3))
    found = house.run()[1]
    assert _tokens(found) == text[3:]
    assert {(p.chain_id.serial, p.base_len) for p in found} == {(0, 3)}
    assert house.model.rows == [3, 1, 1, 1, 1]


def test_a_disagreeing_commit_rolls_back_to_where_they_part() -> None:
    house = House()
    house.open(1, 1, 2, 3)
    house.run()
    (first,) = _go_on([1, 2, 3], 1)
    other = (say([1, 2, 3, first]) + 1) % VOCAB
    house.drafter.commit(Commit(1, 3, (first, other), 3))
    assert len(house.blocks.table(1)) == 1  # four tokens hold, of five that were cached
    text = [1, 2, 3, first, other]
    found = house.run()[1]
    assert _tokens(found) == _go_on(text, 3)
    assert {(p.chain_id.serial, p.base_len) for p in found} == {(1, 5)}
    assert house.model.rows == [3, 1, 1, 1, 1, 1]


def test_a_commit_past_the_tip_is_caught_up_with_in_one_pass() -> None:
    house = House()
    house.open(1, 1, 2, 3, lookahead=1)
    house.run()
    text = [1, 2, 3, *_go_on([1, 2, 3], 1), 7, 8, 9]
    house.drafter.commit(Commit(1, 3, tuple(text[3:]), 2))
    found = house.run()[1]
    assert _tokens(found) == _go_on(text, 2)
    assert {(p.chain_id.serial, p.base_len) for p in found} == {(1, 7)}
    assert house.model.rows == [3, 4, 1]


def test_prompts_are_read_in_chunks_and_rows_are_shared() -> None:
    house = House(max_rows=4)
    house.open(1, *range(10), lookahead=1)
    house.open(2, 5, 6, lookahead=1)
    found = house.run()
    assert house.model.rows == [4, 4, 4]
    assert _tokens(found[1]) == _go_on(list(range(10)), 1)
    assert _tokens(found[2]) == _go_on([5, 6], 1)


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
    assert _tokens(found[1]) == _go_on([1, 2, 3, 9, 9], 1)
    assert 2 not in house.blocks
    assert (house.drafter.status().num_running, house.drafter.status().num_free_blocks) == (2, 1)


def test_without_room_there_is_no_work_until_something_changes() -> None:
    house = House(num_blocks=3)
    house.open(1, *range(8), lookahead=1)
    house.run()
    house.open(2, 5, 6, 7, 8, 9)
    assert house.run() == {}
    assert not house.drafter.has_work()  # though a sequence wants tokens
    text = _go_on(list(range(8)), 2)
    house.drafter.commit(Commit(1, 8, (text[0],), 1))
    assert _tokens(house.run()[1]) == text[1:]
    house.drafter.close(1)
    assert _tokens(house.run()[2]) == _go_on([5, 6, 7, 8, 9], 3)


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
