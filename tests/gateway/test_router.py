"""Who is chosen: a table of cases, and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.router import CHUNK_LEN, MAX_CHUNKS, Candidate, Router, overloaded, prefix_keys
from gateway.types import PeerState

READY = PeerState.READY
LONG = tuple(range(4 * CHUNK_LEN))


def candidates(**loads: int) -> list[Candidate]:
    return [Candidate(address, READY, load) for address, load in loads.items()]


@pytest.mark.parametrize(
    ("loads", "chosen"),
    [
        ({"a": 0}, "a"),
        ({"a": 1, "b": 0}, "b"),
        ({"a": 5, "b": 4, "c": 6}, "b"),
    ],
)
def test_the_least_loaded_takes_what_nobody_knows(loads: dict[str, int], chosen: str) -> None:
    assert Router().choose(candidates(**loads), prefix_keys("", LONG)) == chosen


def test_equals_take_turns() -> None:
    router = Router()
    chosen = [router.choose(candidates(a=1, b=1, c=2)) for _ in range(4)]
    assert chosen == ["a", "b", "a", "b"]


@pytest.mark.parametrize(
    ("load", "least", "chosen"),
    [(0, 0, "a"), (4, 0, "a"), (5, 0, "b"), (10, 3, "a"), (11, 3, "b")],
)
def test_a_known_beginning_wins_unless_its_target_is_overloaded(
    load: int, least: int, chosen: str
) -> None:
    router, keys = Router(), prefix_keys("", LONG)
    assert router.choose(candidates(a=0, b=1), keys) == "a"
    assert router.choose(candidates(a=load, b=least), keys) == chosen
    # Whoever took it last has it.
    assert router.choose(candidates(a=0, b=0), keys) == chosen


def test_the_longest_known_beginning_wins() -> None:
    router = Router()
    assert router.choose(candidates(a=0, b=1), prefix_keys("", LONG[: 2 * CHUNK_LEN])) == "a"
    other = LONG[:CHUNK_LEN] + LONG[2 * CHUNK_LEN :]
    assert router.choose(candidates(a=9, b=0), prefix_keys("", other)) == "b"
    both = candidates(a=1, b=1)
    assert router.choose(both, prefix_keys("", LONG[: 2 * CHUNK_LEN])) == "a"
    assert router.choose(both, prefix_keys("", other)) == "b"


def test_a_known_place_that_is_away_is_not_waited_for() -> None:
    router, keys = Router(), prefix_keys("", LONG)
    assert router.choose(candidates(a=0, b=1), keys) == "a"
    gone = [Candidate("a", PeerState.DRAINING, 0), Candidate("b", READY, 3)]
    assert router.choose(gone, keys) == "b"


def test_keys_are_of_whole_chunks_of_one_scope() -> None:
    assert prefix_keys("", LONG[: CHUNK_LEN - 1]) == []
    keys = prefix_keys("", (*LONG, 1, 2, 3))
    assert len(keys) == 4
    assert prefix_keys("", LONG[: 2 * CHUNK_LEN] + (9,) * CHUNK_LEN)[:2] == keys[:2]
    assert not set(prefix_keys("me", LONG)) & set(keys)
    assert len(prefix_keys("", (1,) * (CHUNK_LEN * MAX_CHUNKS * 2))) == MAX_CHUNKS


def test_what_is_remembered_is_bounded() -> None:
    router = Router(size=4)
    first, second = prefix_keys("", LONG), prefix_keys("", tuple(reversed(LONG)))
    assert router.choose(candidates(a=0, b=1), first) == "a"
    assert router.choose(candidates(a=1, b=0), second) == "b"
    assert router.choose(candidates(a=1, b=0), first) == "b"  # forgotten


STANDING = st.tuples(st.sampled_from(PeerState), st.integers(0, 30), st.booleans())


@given(
    st.lists(st.lists(STANDING, min_size=3, max_size=3), min_size=1, max_size=12),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_only_a_ready_one_that_fits_is_ever_chosen(
    history: list[list[tuple[PeerState, int, bool]]], prompts: list[int]
) -> None:
    router = Router(size=8)
    for standing, prompt in zip(history, prompts, strict=False):
        stood = [Candidate(str(i), *peer) for i, peer in enumerate(standing)]
        usable = {c.address: c for c in stood if c.state is READY and c.fits}
        chosen = router.choose(stood, prefix_keys("", (prompt,) * CHUNK_LEN * 2))
        assert (chosen is None) == (not usable)
        if chosen is not None:
            least = min(c.load for c in usable.values())
            assert not overloaded(usable[chosen].load, least)
