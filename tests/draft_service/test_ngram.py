"""Prompt lookup against a search by brute force."""

from __future__ import annotations

import subprocess
import sys
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.types import ChainId, Commit, OpenSequence, Proposal, SamplingParams
from draft_service.drafters.ngram import NgramDrafter, NgramIndex

SIZES = st.tuples(st.integers(1, 3), st.integers(0, 2)).map(lambda s: (s[0], s[0] + s[1]))


def _find(tokens: list[int], min_n: int, max_n: int) -> int | None:
    """The longest suffix first, then its latest occurrence that something follows."""
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for at in range(len(tokens) - 1, n - 1, -1):
            if tokens[at - n : at] == tokens[-n:]:
                return at
    return None


def _lookup(tokens: list[int], num: int, min_n: int, max_n: int) -> list[int]:
    """What follows the match, token by token; the copy may run into itself."""
    at = _find(tokens, min_n, max_n)
    if at is None:
        return []
    text = list(tokens)
    for i in range(num):
        text.append(text[at + i])
    return text[len(tokens) :]


def _open(*token_ids: int, lookahead: int = 4, max_tokens: int = 100) -> OpenSequence:
    params = SamplingParams(max_tokens=max_tokens)
    return OpenSequence(1, token_ids, len(token_ids), params, lookahead)


def _drafter(*token_ids: int, sizes: tuple[int, int] = (1, 3), lookahead: int = 4) -> NgramDrafter:
    drafter = NgramDrafter(*sizes)
    drafter.open(_open(*token_ids, lookahead=lookahead))
    return drafter


def _step(drafter: NgramDrafter) -> Proposal | None:
    """The proposal of the only sequence."""
    proposals = drafter.step()
    assert not drafter.has_work()
    assert drafter.step() == []
    return proposals[0] if proposals else None


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=5), SIZES)
def test_index_finds_what_brute_force_finds(
    pieces: list[list[int]], sizes: tuple[int, int]
) -> None:
    """However the text grew."""
    index, text = NgramIndex(*sizes), list[int]()
    for piece in pieces:
        text += piece
        index.read(text)
        assert index.find(text) == _find(text, *sizes)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ((1, 2, 3, 1, 2), (3, 1, 2, 3)),  # runs into itself
        ((1, 2, 8, 9, 9, 9, 2, 7, 7, 7, 1, 2), (8, 9, 9, 9)),  # the longer match, though older
        ((1, 2, 8, 0, 1, 2, 9, 0, 1, 2), (9, 0, 1, 2)),  # the latest of equal length
        ((5, 5), (5, 5, 5, 5)),
        ((1, 2, 3), None),
        ((1,), None),
    ],
)
def test_worked_cases(prompt: tuple[int, ...], expected: tuple[int, ...] | None) -> None:
    """The whole run in one piece."""
    p = _step(_drafter(*prompt))
    if expected is None:
        assert p is None
        return
    num = len(prompt)
    assert p == Proposal(1, ChainId(0, 0), base_len=num, start=num, token_ids=expected)


def test_shorter_runs_than_the_least_are_no_match() -> None:
    assert _step(_drafter(1, 2, 3, 4, 2, sizes=(2, 3))) is None
    assert _step(_drafter(1, 2, 3, 4, 1, 2, sizes=(2, 3))) is not None


def test_an_agreeing_commit_goes_on_with_the_same_chain() -> None:
    drafter = _drafter(1, 2, 3, 1, 2)
    _step(drafter)
    drafter.commit(Commit(1, 5, (3, 1), 4))
    assert drafter.has_work()
    assert _step(drafter) == Proposal(1, ChainId(0, 0), base_len=5, start=9, token_ids=(1, 2))


def test_a_commit_up_to_the_tip_goes_on_one_past_it_begins_anew() -> None:
    drafter = _drafter(1, 2, 3, 1, 2)
    _step(drafter)
    drafter.commit(Commit(1, 5, (3, 1, 2, 3), 4))
    assert _step(drafter) == Proposal(1, ChainId(0, 0), 5, 9, (1, 2, 3, 1))
    drafter.commit(Commit(1, 9, (1, 2, 3, 1, 2), 4))
    assert _step(drafter) == Proposal(1, ChainId(0, 1), 14, 14, (3, 1, 2, 3))


def test_a_disagreeing_commit_begins_anew_from_committed_tokens_only() -> None:
    drafter = _drafter(1, 2, 3, 1, 2)
    _step(drafter)
    drafter.commit(Commit(1, 5, (3, 9), 4))
    assert _step(drafter) is None  # 9 was never seen before
    drafter.commit(Commit(1, 7, (1,), 4))
    assert _step(drafter) == Proposal(1, ChainId(0, 2), 8, 8, (2, 3, 9, 1))


def test_output_is_looked_up_like_the_prompt() -> None:
    drafter = _drafter(1)
    assert _step(drafter) is None
    drafter.commit(Commit(1, 1, (7, 8, 7), 2))
    assert _step(drafter) == Proposal(1, ChainId(0, 1), 4, 4, (8, 7))


def test_the_lookahead_of_a_commit_counts() -> None:
    drafter = _drafter(1, 2, 3, 1, 2, lookahead=1)
    assert _step(drafter) == Proposal(1, ChainId(0, 0), 5, 5, (3,))
    drafter.commit(Commit(1, 5, (3,), 3))
    assert _step(drafter) == Proposal(1, ChainId(0, 0), 5, 6, (1, 2, 3))
    drafter.commit(Commit(1, 6, (1,), 1))  # two are still out
    assert _step(drafter) is None
    drafter.commit(Commit(1, 7, (2, 3), 0))
    assert _step(drafter) is None
    drafter.commit(Commit(1, 9, (1,), 2))
    assert _step(drafter) == Proposal(1, ChainId(0, 1), 10, 10, (2, 3))


@pytest.mark.parametrize(("max_tokens", "num"), [(1, 0), (2, 1), (4, 3), (9, 4)])
def test_the_last_token_of_the_text_is_never_drafted(max_tokens: int, num: int) -> None:
    drafter = NgramDrafter(1, 3)
    drafter.open(_open(1, 2, 1, 2, max_tokens=max_tokens))
    p = _step(drafter)
    assert (len(p.token_ids) if p else 0) == num


def test_sequences_do_not_know_of_each_other() -> None:
    drafter = _drafter(1, 2, 3, 1)
    drafter.open(OpenSequence(2, (1,), 1, SamplingParams(), 4))
    assert [p.sequence_id for p in drafter.step()] == [1]
    assert drafter.status().num_running == 2
    drafter.commit(Commit(1, 4, (2,), 4))
    drafter.close(1)
    assert not drafter.has_work()
    assert drafter.status().num_running == 1


class Event(NamedTuple):
    """A commit of so many agreeing tokens and others after them, or a lookahead alone."""

    num_agreeing: int
    others: list[int]
    lookahead: int


EVENTS = st.builds(
    Event, st.integers(0, 5), st.lists(st.integers(0, 2), max_size=3), st.integers(0, 5)
)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=10), st.lists(EVENTS, max_size=8), SIZES)
def test_any_order_of_commits(
    prompt: list[int], events: list[Event], sizes: tuple[int, int]
) -> None:
    """A chain, whatever its pieces, is what brute force finds where it began."""
    drafter = _drafter(*prompt, sizes=sizes, lookahead=4)
    committed, chain = list(prompt), list[int]()
    base, serial, lookahead = len(prompt), 0, 4
    for event in [Event(0, [], 4), *events]:
        decided = chain[: event.num_agreeing] + event.others
        if decided:
            drafter.commit(Commit(1, len(committed), tuple(decided), event.lookahead))
            lookahead = event.lookahead
            agrees = chain[: len(decided)] == decided
            committed += decided
            if agrees:
                chain = chain[len(decided) :]
            else:
                chain, base, serial = [], len(committed), serial + 1
        p = _step(drafter)
        num = max(0, lookahead - len(chain))
        whole = committed + chain
        expected = _lookup(whole[:base], len(whole) - base + num, *sizes)[len(whole) - base :]
        assert (list(p.token_ids) if p else []) == expected
        if p:
            assert (p.chain_id, p.base_len, p.start) == (ChainId(0, serial), base, len(whole))
            chain += p.token_ids


def test_the_process_needs_no_torch() -> None:
    """What `python -m draft_service` imports and does for the n-gram drafter."""
    program = (
        "import sys\n"
        "from common.config import parse\n"
        "from draft_service import __main__ as service\n"
        "drafter, info = service.make_ngram(parse(service.DraftConfig, []))\n"
        "assert info.name == 'ngram'\n"
        "assert not drafter.has_work()\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
