"""Staleness: which draft tokens are still worth testing (design, section 3)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import (
    ChainId,
    OpenSequence,
    Proposal,
    Rule,
    SamplingParams,
    SparseDist,
    Tokens,
)
from target_service.sequence import Sequence

VOCAB = 8
PROMPT = (1, 2, 3)


def _sequence(rule: Rule = Rule.COUPLED, max_tokens: int = 100, lookahead: int = 100) -> Sequence:
    params = SamplingParams(rule=rule, max_tokens=max_tokens)
    return Sequence.of(OpenSequence(1, PROMPT, 3, params, lookahead), (), 1000, 0.0)


def _piece(start: int, *token_ids: int, base: int = 3, serial: int = 0, epoch: int = 1) -> Proposal:
    return Proposal(1, ChainId(epoch, serial), base, start, token_ids)


def _offer(seq: Sequence, *pieces: Proposal) -> None:
    for piece in pieces:
        seq.offer(piece, VOCAB)


def _waiting(seq: Sequence) -> list[int]:
    return [d.token for d in seq.chain.drafts] if seq.chain else []


def _alive(seq: Sequence) -> bool:
    return seq.chain is not None and seq.chain.alive


def test_pieces_of_a_chain_line_up() -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 4, 5), _piece(5, 6), _piece(6))
    assert _waiting(seq) == [4, 5, 6]
    assert sum(seq.take_stale()) == 0


@pytest.mark.parametrize("newer", [{"serial": 2}, {"epoch": 2, "serial": 0}])
def test_a_larger_chain_id_replaces_the_chain(newer: dict[str, int]) -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 4, 5, serial=1), _piece(3, 6, **newer))
    assert _waiting(seq) == [6]
    assert sum(seq.take_stale()) == 2


def test_an_older_chain_is_dropped_and_does_no_harm() -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 6, serial=2), _piece(3, 4, 5, serial=1), _piece(4, 7, serial=2))
    assert _waiting(seq) == [6, 7]
    assert sum(seq.take_stale()) == 2


@pytest.mark.parametrize("start", [5, 3], ids=["gap", "overlap"])
def test_pieces_that_do_not_line_up_kill_the_chain(start: int) -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 4), _piece(start, 5), _piece(4, 6))
    assert not _alive(seq)
    assert _waiting(seq) == []
    assert sum(seq.take_stale()) == 3


def test_a_first_piece_that_does_not_begin_at_the_base_kills_the_chain() -> None:
    seq = _sequence()
    _offer(seq, _piece(4, 5))
    assert not _alive(seq)


def test_a_dead_chain_stays_dead_until_a_larger_id_comes() -> None:
    seq = _sequence()
    _offer(seq, _piece(4, 5, serial=1), _piece(3, 4, serial=1))
    assert _waiting(seq) == []
    _offer(seq, _piece(3, 7, serial=2))
    assert _waiting(seq) == [7]


def test_a_base_beyond_the_committed_length_kills_the_chain() -> None:
    """The draft can't know of tokens that the target has not decided."""
    seq = _sequence()
    _offer(seq, _piece(4, 5, base=4))
    assert not _alive(seq)
    seq.settle([4])
    _offer(seq, _piece(5, 6, base=4))
    assert _waiting(seq) == []
    assert sum(seq.take_stale()) == 2


def test_a_piece_that_straddles_the_committed_length_keeps_its_tail() -> None:
    seq = _sequence()
    seq.settle([4, 5])
    _offer(seq, _piece(3, 4, 5, 6, 7))
    assert _waiting(seq) == [6, 7]
    assert sum(seq.take_stale()) == 2


def test_a_piece_below_the_committed_length_is_compared_and_used_up() -> None:
    seq = _sequence()
    seq.settle([4, 5])
    _offer(seq, _piece(2, 3, 4, base=2), _piece(4, 5, 6, base=2))
    assert _waiting(seq) == [6]


@pytest.mark.parametrize("wrong", [(7, 5, 6), (4, 7, 6), (4, 7)])
def test_a_mismatch_with_committed_tokens_kills_the_chain(wrong: Tokens) -> None:
    seq = _sequence()
    seq.settle([4, 5])
    _offer(seq, _piece(3, *wrong), _piece(3 + len(wrong), 6))
    assert not _alive(seq)
    assert sum(seq.take_stale()) == len(wrong) + 1


def test_a_chain_goes_on_when_it_agrees_with_what_was_decided() -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 4, 5, 6))
    seq.settle([4, 5])
    assert _waiting(seq) == [6]
    seq.settle([6, 7])  # passes the tip
    _offer(seq, _piece(6, 7, 2))
    assert _waiting(seq) == [2]


def test_a_chain_dies_when_it_disagrees_with_what_was_decided() -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 4, 5, 6))
    seq.settle([4, 7])
    _offer(seq, _piece(6, 7))
    assert _waiting(seq) == []
    assert not _alive(seq)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31])
def test_ids_outside_the_vocabulary_kill_the_chain(token: int) -> None:
    seq = _sequence()
    _offer(seq, _piece(3, 4), _piece(4, 5, token), _piece(6, 5))
    assert not _alive(seq)
    assert sum(seq.take_stale()) == 4
    _offer(seq, _piece(3, 4, serial=1))
    assert _waiting(seq) == [4]


GOOD = SparseDist(np.array([4, 5]), np.array([0.25, 0.75]))
BAD = {
    "doubled id": SparseDist(np.array([4, 4]), np.array([0.25, 0.75])),
    "id beyond the vocabulary": SparseDist(np.array([4, VOCAB]), np.array([0.25, 0.75])),
    "negative id": SparseDist(np.array([4, -1]), np.array([0.25, 0.75])),
    "NaN": SparseDist(np.array([4, 5]), np.array([0.25, np.nan])),
    "infinite": SparseDist(np.array([4, 5]), np.array([0.25, np.inf])),
    "negative": SparseDist(np.array([4, 5, 6]), np.array([0.5, 0.75, -0.25])),
    "zero": SparseDist(np.array([4, 5]), np.array([1.0, 0.0])),
    "sums to less": SparseDist(np.array([4, 5]), np.array([0.25, 0.74])),
    "sums to more": SparseDist(np.array([4, 5]), np.array([0.25, 0.76])),
    "fewer probabilities": SparseDist(np.array([4, 5]), np.array([1.0])),
    "empty": SparseDist(np.array([], np.int64), np.array([])),
    "without the token": SparseDist(np.array([5, 6]), np.array([0.25, 0.75])),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_malformed_q_kills_the_chain_never_the_sequence(bad: str) -> None:
    """Judged on the whole support: a chain is not to be dropped for the token it drew."""
    piece = replace(_piece(3, 4, 4), distributions=(GOOD, BAD[bad]))
    seq = _sequence(Rule.REJECTION)
    _offer(seq, piece, _piece(5, 4))
    assert not _alive(seq)
    assert _waiting(seq) == []
    assert seq.tokens == list(PROMPT)
    _offer(seq, replace(_piece(3, 4, serial=1), distributions=(GOOD,)))
    assert _waiting(seq) == [4]


@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.COUPLED])
@pytest.mark.parametrize("num", [1, 3])
def test_as_many_qs_as_tokens_or_none(rule: Rule, num: int) -> None:
    seq = _sequence(rule)
    _offer(seq, replace(_piece(3, 4, 5), distributions=(GOOD,) * num))
    assert not _alive(seq)


def test_q_stays_with_its_token() -> None:
    seq = _sequence(Rule.REJECTION)
    seq.settle([4])
    other = SparseDist(np.array([5]), np.array([1.0]))
    _offer(seq, replace(_piece(3, 4, 5), distributions=(GOOD, other)), _piece(5, 6))
    assert seq.chain is not None
    assert [d.dist for d in seq.chain.drafts] == [other, None]


@pytest.mark.parametrize(
    ("max_tokens", "lookahead", "expected"), [(100, 100, 4), (100, 2, 2), (4, 100, 3), (1, 100, 0)]
)
def test_the_last_token_that_fits_is_not_worth_a_row(
    max_tokens: int, lookahead: int, expected: int
) -> None:
    seq = _sequence(max_tokens=max_tokens, lookahead=lookahead)
    assert seq.run_len() == 0
    _offer(seq, _piece(3, 4, 5, 6, 7))
    assert seq.run_len() == expected


def test_a_late_token_continues_the_run_that_is_being_tested() -> None:
    seq = _sequence()
    assert seq.late_draft([]) is None
    _offer(seq, _piece(3, 4))
    run = list(seq.chain.drafts) if seq.chain else []
    assert seq.late_draft(run) is None
    _offer(seq, _piece(4, 5))
    late = seq.late_draft(run)
    assert late is not None
    assert late.token == 5
    _offer(seq, _piece(3, 6, 7, serial=1))  # another chain, which says otherwise
    assert seq.late_draft(run) is None


# -- any order of events, against an oracle that remembers everything ------------------


class Offer(NamedTuple):
    """A piece of a chain; positions relative to the committed length."""

    serial: int
    base: int
    skip: int  # from where the piece would have to start
    tokens: Tokens


class Settle(NamedTuple):
    """A step that tests up to num drafts and, at the first `keep`, disagrees."""

    num: int
    keep: int
    token: int


@dataclass
class Oracle:
    """All of the newest chain, looked at afresh whenever it is asked for."""

    serial: int = -1
    base: int = 0
    dead: bool = False
    tokens: Tokens = ()

    def offer(self, p: Proposal, committed: list[int]) -> None:
        if p.chain_id.serial > self.serial:
            self.serial, self.base, self.tokens = p.chain_id.serial, p.base_len, ()
            self.dead = p.base_len > len(committed)
        if p.chain_id.serial == self.serial:
            self.dead |= p.start != self.base + len(self.tokens)
            self.tokens += p.token_ids

    def waiting(self, committed: list[int]) -> list[int]:
        decided = committed[self.base : self.base + len(self.tokens)]
        if self.dead or decided != list(self.tokens[: len(decided)]):
            return []
        return list(self.tokens[len(decided) :])


TOKENS = st.lists(st.integers(0, 1), max_size=4).map(tuple)
OFFERS = st.builds(
    Offer, st.integers(0, 3), st.sampled_from([0, 0, 0, -1, -2, 1]), st.sampled_from([0] * 9 + [1]),
    TOKENS,
)  # fmt: skip
SETTLES = st.builds(Settle, st.integers(0, 3), st.integers(0, 4), st.integers(0, 1))


@given(st.lists(OFFERS | SETTLES, max_size=40))
def test_every_token_received_is_tested_waiting_or_stale(events: list[Offer | Settle]) -> None:
    seq, oracle, num_stale = _sequence(), Oracle(), 0
    for event in events:
        if isinstance(event, Offer):
            ends = {oracle.serial: oracle.base + len(oracle.tokens)}
            base = len(seq.tokens) + event.base
            start = ends.get(event.serial, base) + event.skip
            piece = _piece(start, *event.tokens, base=base, serial=event.serial)
            oracle.offer(piece, seq.tokens)
            _offer(seq, piece)
        else:
            run = _waiting(seq)[: event.num]
            kept = run[: event.keep]
            rejected = kept != run
            seq.num_tested += len(kept) + rejected
            seq.settle([*kept, 1 - run[len(kept)] if rejected else event.token])
        fresh = sum(seq.take_stale())
        assert fresh >= 0
        num_stale += fresh
        assert _waiting(seq) == oracle.waiting(seq.tokens)
        assert seq.num_received == seq.num_tested + len(_waiting(seq)) + num_stale
