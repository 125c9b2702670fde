"""The bounded wait: an engine with one sequence gives its draft a moment, others never wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from common.engine_thread import EngineThread
from common.types import Commit, OpenSequence, StepResult, Verdict
from target_service.cost import StepCost
from target_service.goodput import Goodput, Objective
from tests.counting import CONTEXT, VOCAB, CountingDrafter, House, open_sequence

STEP, TURNAROUND = 0.04, 0.008  # seconds


def _house() -> House:
    """Steps take STEP, and the policy knows it."""
    house = House(
        policy=Goodput(
            StepCost(np.array([1, 2]), np.array([STEP, STEP]), 0.0, 0.0), Objective.LATENCY
        )
    )
    house.model.during = lambda: time.sleep(STEP)
    return house


class Loop:
    """An engine's thread, and a draft that answers each verdict of sequence 1 after TURNAROUND.

    It is wrong at every fourth position.
    """

    def __init__(self, house: House, first: OpenSequence) -> None:
        self.house, self.verdicts = house, list[Verdict]()
        self.drafter = CountingDrafter(frozenset(range(0, CONTEXT, 4)))
        self.drafter.open(first)
        self.done = threading.Event()
        self.thread = EngineThread(house.engine, self._hear, self._fail)

    def run(self) -> list[Verdict]:
        self.thread.start()
        self.thread.wake()
        assert self.done.wait(20)
        self.thread.stop()
        return self.verdicts

    def _fail(self, error: BaseException) -> None:
        self.done.set()

    def _hear(self, result: StepResult) -> None:
        for v in result.verdicts:
            if v.sequence_id != 1:
                continue
            self.verdicts.append(v)
            if v.ended:
                self.done.set()
            else:
                threading.Timer(TURNAROUND, self.answer, [v]).start()

    def answer(self, v: Verdict) -> None:
        self.drafter.commit(Commit(1, v.committed_len, v.token_ids, v.lookahead))
        for p in self.drafter.step():
            self.house.submit(replace(p, arrived_at=time.monotonic()))
        self.thread.wake()


def test_one_sequence_waits_for_its_draft(show: Callable[[str], None]) -> None:
    house = _house()
    first = open_sequence(1, max_tokens=40, lookahead=3)
    house.submit(first)
    verdicts = Loop(house, first).run()
    assert [t for v in verdicts for t in v.token_ids] == [(4 + i) % VOCAB for i in range(40)]
    waited = [v.timing.waited_seconds for v in verdicts]
    later = verdicts[len(verdicts) // 2 :]
    mean_ms = sum(waited) / len(waited) * 1e3
    show(f"{len(verdicts)} steps for 40 tokens, waited {mean_ms:.1f} ms a step")
    assert len(verdicts) < 24  # 40 without a draft, about 27 without the wait
    assert max(waited) < STEP
    assert any(0 < v.timing.waited_seconds <= v.timing.step_seconds for v in later)


def test_nobody_waits_beside_another_sequence() -> None:
    house = _house()
    first = open_sequence(1, max_tokens=15, lookahead=3)
    house.submit(first, open_sequence(2, max_tokens=60, lookahead=0))
    verdicts = Loop(house, first).run()
    assert all(v.timing.waited_seconds == 0 for v in verdicts)


def test_a_silent_draft_is_not_waited_for_for_long() -> None:
    """Whoever answered once and then no more costs ever less."""
    house = _house()
    first = open_sequence(1, max_tokens=30, lookahead=3)
    house.submit(first)
    loop = Loop(house, first)
    answer, answered = loop.answer, list[Verdict]()

    def answer_twice(v: Verdict) -> None:
        if len(answered) < 2:
            answered.append(v)
            answer(v)

    loop.answer = answer_twice  # type: ignore[method-assign]
    verdicts = loop.run()
    waited = [v.timing.waited_seconds for v in verdicts]
    assert sum(waited) < 3 * STEP
    assert sum(waited[-10:]) == 0
