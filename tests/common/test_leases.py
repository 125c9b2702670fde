"""Which stream holds which sequence, without an engine, a loop or a clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from common.errors import CapacityError, sequence_error
from common.leases import Lease, Leases
from common.types import (
    ChainId,
    CloseSequence,
    Commit,
    Draining,
    EngineStatus,
    FinishReason,
    Progress,
    Proposal,
    Refusal,
    StepResult,
    Verdict,
)

ERROR = sequence_error(CapacityError("no room"))


class House:
    """Leases over an inbox that is a list, at a time that a test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("common.leases.time", clock)
        self.inbox: list[Any] = []
        self.leases = Leases(self.inbox.append)

    def attach(self, *wire_ids: int) -> tuple[Lease, dict[int, int]]:
        """A stream that holds sequences, and their engine ids."""
        lease = self.leases.attach()
        ids = {}
        for wire_id in wire_ids:
            engine_id = self.leases.open(lease, wire_id)
            assert engine_id is not None
            ids[wire_id] = engine_id
        return lease, ids

    def deliver(self, *replies: Any, **status: int) -> None:
        kinds = {Verdict: "verdicts", Proposal: "proposals", Progress: "progress"}
        fields: dict[str, tuple[Any, ...]] = {}
        for reply in replies:
            name = kinds.get(type(reply), "refusals")
            fields[name] = (*fields.get(name, ()), reply)
        result: Any = StepResult
        self.leases.deliver(result(**fields, status=EngineStatus(**status)))


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch) -> House:
    return House(monkeypatch)


def _heard(lease: Lease) -> list[Any]:
    """What is in the outbox but for the status."""
    return [x for x in lease.outbox._items if not isinstance(x, EngineStatus)]


def _statuses(lease: Lease) -> list[EngineStatus]:
    """Every status since this was last asked."""
    items, lease.outbox._items = lease.outbox._items, []
    return [x for x in items if isinstance(x, EngineStatus)]


def _verdict(sid: int, **changes: Any) -> Verdict:
    return Verdict(sid, 3, 0, 0, (7,), **changes)


def _closed(lease: Lease) -> bool:
    return lease.outbox._closed


def test_ids_are_translated_both_ways(house: House) -> None:
    a, a_ids = house.attach(1, 2)
    b, b_ids = house.attach(1)
    assert len({*a_ids.values(), *b_ids.values()}) == 3
    a.submit(Commit(2, 3, (7,), 4))
    b.submit(Commit(1, 3, (7,), 4))
    assert house.inbox == [Commit(a_ids[2], 3, (7,), 4), Commit(b_ids[1], 3, (7,), 4)]
    proposal = Proposal(a_ids[1], ChainId(0, 0), 3, 3, (5,))
    house.deliver(_verdict(a_ids[1]), _verdict(b_ids[1]), proposal, Progress(a_ids[2], 1, 0))
    assert _heard(a) == [Progress(2, 1, 0), _verdict(1), Proposal(1, ChainId(0, 0), 3, 3, (5,))]
    assert _heard(b) == [_verdict(1)]


def test_a_fork_is_told_by_the_ids_of_its_own_stream(house: House) -> None:
    a, a_ids = house.attach(0, 1, 2)
    b, b_ids = house.attach(1)
    assert (a.engine_id(1), a.engine_id(2)) == (a_ids[1], a_ids[2])
    assert b.engine_id(1) == b_ids[1] != a_ids[1]
    assert b.engine_id(2) == 0  # another stream's
    assert a.engine_id(0) == 0  # none, though a sequence is called so
    a.submit(CloseSequence(1))
    assert a.engine_id(1) == 0


def test_an_id_is_held_once_in_a_stream(house: House) -> None:
    lease, _ = house.attach(1)
    assert house.leases.open(lease, 1) is None
    assert house.leases.num_live() == 1


@pytest.mark.parametrize(
    "ending",
    [_verdict(0, finish_reason=FinishReason.LENGTH), _verdict(0, error=ERROR), Refusal(0, ERROR)],
    ids=["finish", "error", "refusal"],
)
def test_what_has_ended_is_forgotten_after_it_was_told(house: House, ending: Any) -> None:
    lease, ids = house.attach(9)
    last = type(ending)(
        **{f: getattr(ending, f) for f in ending.__slots__} | {"sequence_id": ids[9]}
    )
    house.deliver(_verdict(ids[9]), last, _verdict(ids[9]) if isinstance(last, Refusal) else last)
    assert type(_heard(lease)[-1]) is type(ending)
    assert house.leases.num_live() == 0
    lease.submit(Commit(9, 4, (7,), 4))
    assert house.inbox == []
    house.leases.detach(lease)
    assert house.inbox == []  # nothing to close


def test_close_wins_over_whatever_comes_later(house: House) -> None:
    lease, ids = house.attach(1)
    lease.submit(CloseSequence(1))
    assert house.inbox == [CloseSequence(ids[1])]
    house.deliver(_verdict(ids[1]))
    lease.submit(Commit(1, 3, (7,), 4))
    lease.submit(CloseSequence(1))
    assert _heard(lease) == []
    assert house.inbox == [CloseSequence(ids[1])]
    assert house.leases.num_live() == 0


def test_unknown_ids_are_ignored_and_counted_with_the_engine_s_own(house: House) -> None:
    a, _ = house.attach(1)
    b, _ = house.attach()
    b.submit(CloseSequence(1))  # another stream's
    a.submit(Commit(2, 3, (7,), 4))
    assert house.inbox == []
    house.deliver(num_ignored=5)
    assert [s.num_ignored for s in _statuses(a)] == [7]


def test_the_end_of_a_stream_closes_what_it_carried(house: House) -> None:
    a, a_ids = house.attach(1, 2)
    b, b_ids = house.attach(1)
    house.leases.detach(a)
    assert house.inbox == [CloseSequence(a_ids[1]), CloseSequence(a_ids[2])]
    assert _closed(a)
    house.deliver(_verdict(a_ids[1]), _verdict(b_ids[1]))
    assert _heard(a) == []
    assert _heard(b) == [_verdict(1)]
    assert house.leases.num_live() == 1


def test_status_every_half_second(house: House) -> None:
    lease, _ = house.attach(1)
    house.deliver(num_running=1)
    assert len(_statuses(lease)) == 1  # a new stream hears it at once
    house.now += 0.49
    house.deliver(num_running=1)
    assert _statuses(lease) == []
    house.now += 0.01
    house.deliver(num_running=2)
    assert [s.num_running for s in _statuses(lease)] == [2]


@pytest.mark.parametrize("busy", [{"num_running": 1}, {"num_waiting": 1}])
def test_status_at_once_when_the_engine_falls_idle(house: House, busy: dict[str, int]) -> None:
    lease, _ = house.attach(1)
    house.deliver(**busy)
    _statuses(lease)
    house.deliver()
    assert _statuses(lease) == [EngineStatus()]
    house.deliver()
    assert _statuses(lease) == []  # once


def test_draining_and_the_end_reach_every_stream(house: House) -> None:
    streams = [house.attach(1)[0], house.attach()[0]]
    house.leases.announce(Draining(3.0))
    assert [_heard(lease) for lease in streams] == [[Draining(3.0)]] * 2
    house.leases.end()
    assert all(map(_closed, streams))
    assert house.inbox == []  # each stream's own end will close its sequences
