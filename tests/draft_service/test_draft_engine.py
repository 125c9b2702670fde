"""The draft's engine: one sequence's trouble ends that sequence and nothing else."""

from __future__ import annotations

import grpc

from common.errors import InvalidRequestError
from common.types import CloseSequence, Commit, OpenSequence, Refusal, SamplingParams
from draft_service.drafters.ngram import NgramDrafter
from draft_service.engine import DraftEngine


class Picky(NgramDrafter):
    """Does not serve texts that begin with 0."""

    def open(self, s: OpenSequence) -> None:
        if s.token_ids[0] == 0:
            raise InvalidRequestError("begins with 0", field="token_ids")
        super().open(s)


def _engine() -> DraftEngine:
    return DraftEngine(Picky(1, 2))


def _open(sid: int, *token_ids: int) -> OpenSequence:
    return OpenSequence(sid, token_ids, len(token_ids), SamplingParams(), lookahead=2)


def test_events_are_taken_in_order_and_one_step_draws() -> None:
    engine = _engine()
    assert not engine.has_work()
    engine.submit(_open(1, 5, 6, 5))
    engine.submit(Commit(1, 3, (6,), 2))
    engine.submit(_open(2, 7, 7))
    assert engine.has_work()
    result = engine.step()
    drawn = {p.sequence_id: (p.start, p.token_ids) for p in result.proposals}
    assert drawn == {1: (4, (5, 6)), 2: (2, (7, 7))}
    assert (engine.num_live(), result.status.num_running) == (2, 2)
    assert not engine.has_work()


def test_an_open_that_is_not_served_is_a_refusal() -> None:
    engine = _engine()
    engine.submit(_open(1, 0, 1))
    engine.submit(_open(2, 7, 7))
    result = engine.step()
    (refusal,) = result.refusals
    assert (refusal.sequence_id, refusal.error.field) == (1, "token_ids")
    assert refusal.error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert [p.sequence_id for p in result.proposals] == [2]
    assert engine.num_live() == 1
    engine.submit(Commit(1, 2, (5,), 2))
    assert engine.step().status.num_ignored == 1


def test_a_commit_that_does_not_follow_closes_its_sequence() -> None:
    """What the draft knows is no longer what the target has committed."""
    engine = _engine()
    engine.submit(_open(1, 7, 7))
    engine.submit(_open(2, 7, 7))
    engine.step()
    engine.submit(Commit(1, 3, (7,), 2))
    engine.submit(Commit(2, 2, (7,), 2))
    result = engine.step()
    (refusal,) = result.refusals
    assert refusal.sequence_id == 1
    assert refusal.error.code == grpc.StatusCode.INTERNAL.value[0]
    assert "at 3 does not follow the 2" in refusal.error.message
    assert [p.sequence_id for p in result.proposals] == [2]
    assert (engine.num_live(), result.status.num_running) == (1, 1)
    engine.submit(CloseSequence(1))
    assert engine.step().refusals == ()


def test_unknown_ids_are_ignored_and_counted() -> None:
    engine = _engine()
    engine.submit(Commit(9, 3, (7,), 2))
    engine.submit(CloseSequence(9))
    engine.submit(_open(1, 7, 7))
    engine.submit(CloseSequence(1))
    engine.submit(Commit(1, 2, (7,), 2))
    result = engine.step()
    assert (result.proposals, result.refusals) == ((), ())
    assert result.status.num_ignored == 3
    assert engine.num_live() == 0
    assert not engine.has_work()


def test_refusals_are_told_once() -> None:
    engine = _engine()
    engine.submit(_open(1, 0))
    assert [type(r) for r in engine.step().refusals] == [Refusal]
    assert engine.step().refusals == ()
