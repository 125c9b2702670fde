"""What must not disturb anyone else: bad opens, closes at any time, rows without numbers."""

from __future__ import annotations

import time
from typing import Any

import grpc
import pytest

from common.errors import SequenceError
from common.types import CloseSequence
from tests.counting import CONTEXT, VOCAB, House, open_sequence, piece

INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
INTERNAL = grpc.StatusCode.INTERNAL.value[0]


def _count(first: int, num: int) -> list[int]:
    return list(range(first, first + num))


def _error(house: House, sid: int) -> SequenceError:
    error = house.last[sid].error
    assert error is not None
    return error


# -- opens that can't be served --------------------------------------------------------


@pytest.mark.parametrize(
    ("token_ids", "code", "field"),
    [
        ((), INVALID, "input"),
        (tuple(_count(0, CONTEXT)), INVALID, "input"),
        ((1, VOCAB), INVALID, "input"),
        ((1, -1), INVALID, "input"),
        ((1,) * 9, EXHAUSTED, "sampling.max_tokens"),
    ],
    ids=["empty", "as long as the context", "id too large", "negative id", "larger than the cache"],
)
def test_what_can_t_be_served_is_refused_and_the_others_go_on(
    token_ids: tuple[int, ...], code: int, field: str
) -> None:
    house = House(num_blocks=6)
    house.submit(open_sequence(1, max_tokens=10), open_sequence(2, token_ids))
    house.submit(open_sequence(3, max_tokens=10))
    house.step()
    assert (_error(house, 2).code, _error(house, 2).field) == (code, field)
    assert house.text[2] == []
    house.finish()
    assert house.text[1] == house.text[3] == _count(4, 10)


def test_the_largest_that_fits_the_cache_is_served() -> None:
    """24 slots hold 25 tokens: the last one is never put into the cache."""
    house = House(num_blocks=6)
    whole = tuple(_count(0, 24))
    house.submit(open_sequence(1, max_tokens=22), open_sequence(2, max_tokens=23))
    house.submit(open_sequence(3, whole, max_tokens=1), open_sequence(4, whole, max_tokens=2))
    house.finish()
    assert house.text[1] == _count(4, 22)
    assert house.text[3] == [24]
    assert _error(house, 2).code == _error(house, 4).code == EXHAUSTED


@pytest.mark.parametrize(
    "changes", [{"num_prompt": 0}, {"num_prompt": 4}, {"num_prompt": 1, "max_tokens": 2}]
)
def test_a_sequence_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    """No prompt, a prompt beyond the tokens, nothing left to decide."""
    house = House()
    house.submit(open_sequence(1, **changes))
    house.step()
    assert _error(house, 1).code == INVALID
    house.finish()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"logit_bias": ((3, 1.0), (VOCAB, 1.0))}, f"sampling.logit_bias[{VOCAB}]"),
        ({"stop_token_ids": (3, VOCAB)}, "sampling.stop_token_ids[1]"),
        ({"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))}, "sampling.min_tokens"),
    ],
)
def test_sampling_that_the_vocabulary_can_t_serve_is_refused(
    changes: dict[str, Any], field: str
) -> None:
    house = House()
    house.submit(open_sequence(1, **changes), open_sequence(2, max_tokens=3))
    house.step()
    assert (_error(house, 1).code, _error(house, 1).field) == (INVALID, field)
    house.finish()
    assert house.text[2] == [4, 5, 6]


def test_a_full_queue_refuses_but_not_the_resumed() -> None:
    house = House(max_running=1, max_waiting=1)
    house.submit(open_sequence(1, max_tokens=2))
    house.step()
    house.submit(*(open_sequence(i, max_tokens=2) for i in (2, 3)))
    house.submit(open_sequence(4, max_tokens=2, resumed=True))
    house.step()
    assert _error(house, 3).code == EXHAUSTED
    assert _error(house, 3).retry_after_seconds == 1.0
    house.finish()
    assert house.text[2] == house.text[4] == [4, 5]


# -- closes ----------------------------------------------------------------------------


def test_close_while_waiting_and_while_running() -> None:
    house = House(max_running=1)
    house.submit(open_sequence(1), open_sequence(2), open_sequence(3))
    house.step()
    house.submit(CloseSequence(1), CloseSequence(2))
    assert [v.sequence_id for v in house.step().verdicts] == [3]
    assert house.engine.num_live() == 1
    house.finish()
    assert house.text[3] == _count(4, 20)


def test_close_in_the_step_that_opens() -> None:
    house = House()
    house.submit(open_sequence(1), CloseSequence(1))
    assert house.step().verdicts == ()
    house.finish()


def test_close_during_the_pass_takes_effect_in_the_next_step() -> None:
    house = House()
    house.submit(open_sequence(1), open_sequence(2, max_tokens=4))
    house.model.during = lambda: house.submit(CloseSequence(1))
    assert len(house.step().verdicts) == 2
    house.model.during = lambda: None
    assert [v.sequence_id for v in house.step().verdicts] == [2]
    house.finish()
    assert house.text[1] == [4]


def test_close_of_what_has_ended_during_the_pass_is_ignored() -> None:
    house = House()
    house.submit(open_sequence(1, max_tokens=1))
    house.model.during = lambda: house.submit(CloseSequence(1))
    house.step()
    assert house.engine.has_work()
    assert house.step().status.num_ignored == 1
    house.finish()


def test_events_for_unknown_ids_are_ignored_and_counted() -> None:
    house = House()
    house.submit(CloseSequence(7), piece(8, 3, 4), open_sequence(1), piece(9, 3, 4))
    assert house.step().status.num_ignored == 3
    house.model.during = lambda: house.submit(piece(7, 3, 4))
    assert house.step().status.num_ignored == 3
    house.model.during = lambda: None
    assert house.step().status.num_ignored == 4
    house.finish()
    assert house.text[1] == _count(4, 20)


# -- rows without numbers --------------------------------------------------------------


def test_a_row_without_numbers_ends_its_own_sequence_only() -> None:
    house = House(without_numbers=(42,))
    house.submit(open_sequence(1, (40,)), open_sequence(2), open_sequence(3, (50,)))
    house.finish()
    assert house.text[1] == [41, 42]
    assert _error(house, 1).code == INTERNAL
    assert house.last[1].committed_len == 3
    assert house.text[2] == _count(4, 20)
    assert house.text[3] == _count(51, 20)


def test_a_drafted_row_without_numbers_that_is_not_reached_does_no_harm() -> None:
    house = House(without_numbers=(70,))
    house.submit(open_sequence(1), piece(1, 3, 4, 70, 71))
    house.step()
    assert house.last[1].token_ids == (4, 5)
    assert (house.last[1].num_tested, house.last[1].num_accepted) == (2, 1)
    house.finish()
    assert house.text[1] == _count(4, 20)


def test_an_accepted_run_is_cut_before_a_row_without_numbers() -> None:
    house = House(without_numbers=(5,))
    house.submit(open_sequence(1), piece(1, 3, 4, 5, 6))
    house.step()
    v = house.last[1]
    assert (v.token_ids, v.num_tested, v.num_accepted, v.error) == ((4, 5), 2, 2, None)
    house.step()
    assert _error(house, 1).code == INTERNAL
    house.finish()


# -- time ------------------------------------------------------------------------------


def test_a_sequence_whose_time_is_over_ends_and_the_others_go_on() -> None:
    house = House()
    now = time.monotonic()
    house.submit(open_sequence(1, timeout_seconds=0.0), open_sequence(2))
    house.submit(open_sequence(3, timeout_seconds=60.0, arrived_at=now))
    house.submit(open_sequence(4, timeout_seconds=60.0, arrived_at=now - 61.0))
    house.finish()
    for sid in (1, 4):
        error = house.last[sid].error
        assert error is not None
        assert error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
        assert house.text[sid] == []
    assert len(house.text[2]) == len(house.text[3]) == 20


def test_time_may_run_out_in_mid_text() -> None:
    house = House()
    house.submit(open_sequence(1, timeout_seconds=0.03), open_sequence(2))
    house.step()
    house.submit(piece(1, 4, 5, 6))
    time.sleep(0.04)
    house.finish()
    assert house.last[1].stale.finished == house.last[1].num_stale == 2
    error = house.last[1].error
    assert error is not None
    assert error.reason == "TIMED_OUT"
    assert house.text[1] == [4]
    assert len(house.text[2]) == 20
