"""The target's engine, step by step, on a model that counts: the answer is always known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.types import FinishReason, TokenOrigin
from tests.counting import (
    CONTEXT,
    PROMPT,
    CountingDrafter,
    House,
    open_sequence,
    piece,
)
from tests.driver import Driver, Script


def _count(first: int, num: int) -> list[int]:
    return list(range(first, first + num))


# -- lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("script", [Script(), Script([1], [2]), Script([0, 1, 2], [3], [1])])
@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_max_tokens_is_kept_to_the_token(max_tokens: int, script: Script) -> None:
    house = House()
    driver = Driver(
        house.engine, house.model, lambda: CountingDrafter(frozenset({7, 8, 15})), script
    )
    text = driver.run([open_sequence(1, max_tokens=max_tokens)])[1]
    assert text == _count(4, max_tokens)
    assert driver.verdicts[1][-1].finish_reason is FinishReason.LENGTH
    house.finish()


def test_a_run_that_came_whole_leaves_room_for_the_last_token() -> None:
    """A run of n commits n + 1 tokens, so only max_tokens - 1 of 8 drafts are worth a row."""
    house = House()
    house.submit(open_sequence(1, max_tokens=4), piece(1, 3, *_count(4, 8)))
    house.step()
    v = house.last[1]
    assert (v.token_ids, v.num_tested, v.num_accepted) == ((4, 5, 6, 7), 4, 4)
    assert v.finish_reason is FinishReason.LENGTH
    assert v.num_stale == 4
    house.finish()


@pytest.mark.parametrize("drafted", [False, True])
def test_a_prompt_one_short_of_the_context_yields_one_token(drafted: bool) -> None:
    house = House()
    prompt = tuple(_count(0, CONTEXT - 1))
    house.submit(open_sequence(1, prompt))
    if drafted:
        house.submit(piece(1, CONTEXT - 1, CONTEXT - 1, CONTEXT))
    house.finish()
    assert house.text[1] == [CONTEXT - 1]
    assert house.last[1].finish_reason is FinishReason.LENGTH


def test_a_resumed_sequence_gets_what_is_left_of_its_max_tokens() -> None:
    house = House()
    house.submit(open_sequence(1, (*PROMPT, 4, 5), num_prompt=3, max_tokens=6, resumed=True))
    house.finish()
    assert house.text[1] == [6, 7, 8, 9]


# -- stop tokens -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "tested", "stale"),
    [(4, 1, 3), (5, 2, 2), (7, 4, 0), (8, 4, 0)],
    ids=["first", "inside", "last drafted", "bonus"],
)
@pytest.mark.parametrize("kind", ["eos", "stop id"])
def test_a_stop_token_cuts_an_accepted_run(kind: str, stop: int, tested: int, stale: int) -> None:
    """Counts are taken after the cut; the stop token itself is committed."""
    house = House(eos=(stop,) if kind == "eos" else ())
    stop_ids = () if kind == "eos" else (stop,)
    house.submit(open_sequence(1, stop_token_ids=stop_ids), piece(1, 3, 4, 5, 6, 7))
    house.step()
    v = house.last[1]
    assert v.token_ids == tuple(_count(4, stop - 3))
    assert v.finish_reason is FinishReason.STOP_TOKEN
    assert (v.num_tested, v.num_accepted, v.num_stale) == (tested, tested, stale)
    assert set(v.origins()[:tested]) == {TokenOrigin.ACCEPTED}
    house.finish()


def test_a_recovered_stop_token_ends_the_sequence() -> None:
    house = House(eos=(5,))
    house.submit(open_sequence(1), piece(1, 3, 4, 9, 10))
    house.step()
    v = house.last[1]
    assert (v.token_ids, v.num_tested, v.num_accepted, v.num_stale) == ((4, 5), 2, 1, 1)
    assert v.origins() == (TokenOrigin.ACCEPTED, TokenOrigin.RECOVERED)
    assert v.finish_reason is FinishReason.STOP_TOKEN


def test_eos_may_be_ignored_stop_ids_may_not() -> None:
    house = House(eos=(5,))
    house.submit(open_sequence(1, ignore_eos=True, stop_token_ids=(7,)))
    house.finish()
    assert house.text[1] == [4, 5, 6, 7]


def test_the_last_token_may_be_a_stop_token() -> None:
    house = House(eos=(5,))
    house.submit(open_sequence(1, max_tokens=2))
    house.finish()
    assert house.last[1].finish_reason is FinishReason.STOP_TOKEN


# -- drafts ----------------------------------------------------------------------------


def test_verdicts_tell_how_each_token_came_about() -> None:
    house = House()
    house.submit(open_sequence(1), piece(1, 3, 4, 5))
    house.step()
    v = house.last[1]
    assert (v.committed_len, v.token_ids, v.num_tested, v.num_accepted) == (3, (4, 5, 6), 2, 2)
    assert v.origins() == (TokenOrigin.ACCEPTED,) * 2 + (TokenOrigin.BONUS,)
    house.submit(piece(1, 6, 7, 0, 9, serial=1))
    house.step()
    v = house.last[1]
    assert (v.committed_len, v.token_ids, v.num_tested, v.num_accepted) == (6, (7, 8), 2, 1)
    assert (v.num_stale, v.step_id, v.lookahead) == (1, 2, 8)


@pytest.mark.parametrize(("token", "accepted"), [(6, 3), (0, 2)])
def test_a_token_that_comes_during_the_pass_is_tested_in_the_last_row(
    token: int, accepted: int
) -> None:
    house = House()
    house.submit(open_sequence(1), piece(1, 3, 4, 5))
    house.model.during = lambda: house.submit(replace(piece(1, 3, token), start=5))
    house.step()
    v = house.last[1]
    assert (v.token_ids, v.num_tested, v.num_accepted) == ((4, 5, 6), 3, accepted)


@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_no_more_is_tested_than_the_lookahead(lookahead: int) -> None:
    house = House()
    house.submit(open_sequence(1, lookahead=lookahead, max_tokens=9), piece(1, 3, 4, 5, 6))
    house.step()
    assert house.last[1].num_tested == lookahead
    assert house.text[1] == _count(4, lookahead + 1)
    house.finish()


# -- scheduling, seen from outside -----------------------------------------------------


def test_long_prompts_are_read_in_chunks_beside_the_others() -> None:
    house = House(max_rows=8)
    house.submit(open_sequence(1), open_sequence(2, tuple(_count(0, 30))))
    house.step()
    house.submit(piece(1, 4, *_count(5, 8)))
    for _ in range(3):
        house.step()
    assert len(house.text[1]) == 4
    assert 2 not in house.text
    house.finish()
    assert house.text[2] == _count(30, 20)


def test_preempted_sequences_say_the_same() -> None:
    house = House(num_blocks=10)
    house.submit(*(open_sequence(i, (i, i + 1)) for i in range(1, 7)))
    house.finish()
    assert house.engine.scheduler.num_preemptions > 0
    for i in range(1, 7):
        assert house.text[i] == _count(i + 2, 20)


def test_status_and_progress() -> None:
    house = House(max_running=1, max_rows=8)
    house.submit(*(open_sequence(i, tuple(_count(0, 30))) for i in (1, 2, 3)))
    result = house.step()
    status = result.status
    assert (status.num_running, status.num_waiting) == (1, 2)
    assert (status.num_blocks, status.num_free_blocks) == (64, 62)
    told = {p.sequence_id: (p.num_ahead, p.num_prefilled) for p in result.progress}
    assert told == {1: (0, 8), 2: (1, 0), 3: (2, 0)}
    assert house.step().progress == ()  # not every step


def test_the_first_verdict_alone_tells_of_queue_and_prefill() -> None:
    house = House()
    house.submit(open_sequence(1))
    house.step()
    first = house.last[1].timing
    assert first.prefill_seconds > 0
    assert first.step_seconds == 0
    house.step()
    assert house.last[1].timing.prefill_seconds == 0
    assert house.last[1].timing.queue_seconds == 0
    assert house.last[1].timing.step_seconds > 0
