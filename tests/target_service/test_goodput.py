"""Drafted rows are taken where they pay, and only there; the lookahead follows the drafts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.types import ChainId, OpenSequence, Proposal, SamplingParams
from target_service.cost import Shape, StepCost
from target_service.estimates import Acceptance
from target_service.goodput import PROBE_EVERY, Fixed, Goodput, Objective
from target_service.sequence import Sequence

MAX_LOOKAHEAD = 16
FOLLOWS_WITHIN = 20  # steps after a switch of domain


def _cost(row: float = 0.02) -> StepCost:
    """A step of 1 row takes 1 s, every further one adds `row` seconds."""
    knots = np.array([1, 64])
    return StepCost(knots, 1.0 + row * (knots - 1), prompt_row=row, position=0.0)


def _sequence(sid: int = 1, lookahead: int = MAX_LOOKAHEAD) -> Sequence:
    sampling = SamplingParams(max_tokens=100_000, seed=sid)
    return Sequence.of(OpenSequence(sid, (1, 2), 2, sampling, lookahead), (), 1 << 20, 0.0)


def _offer(seq: Sequence, num: int, serial: int = 0) -> None:
    at = len(seq.tokens)
    seq.offer(Proposal(seq.sid, ChainId(1, serial), at, at, (3,) * num), vocab_size=10)


def _knowing(rate: float, sid: int = 1) -> Sequence:
    """A sequence whose draft tokens are kept at this rate, and that knows it."""
    seq = _sequence(sid)
    seq.acceptance.rate = lambda prior: rate  # type: ignore[method-assign]
    return seq


def _score(rates: list[float], nums: Iterable[int], objective: Objective, cost: StepCost) -> float:
    """What a choice of run lengths is worth, by the objective's own words."""
    nums = list(nums)
    tokens = [sum(a**i for i in range(n + 1)) for a, n in zip(rates, nums, strict=True)]
    seconds = float(cost.seconds(Shape(len(nums) + sum(nums))))
    if objective is Objective.LATENCY:
        return -seconds * sum(1 / t for t in tokens)
    return sum(tokens) / seconds


@settings(max_examples=150)
@given(
    sequences=st.lists(st.tuples(st.floats(0, 0.99), st.integers(0, 5)), min_size=1, max_size=3),
    row=st.floats(0.001, 0.9),
    objective=st.sampled_from(Objective),
)
def test_no_other_choice_is_better(
    sequences: list[tuple[float, int]], row: float, objective: Objective
) -> None:
    cost = _cost(row)
    seqs = [_knowing(rate, sid) for sid, (rate, _) in enumerate(sequences)]
    for seq, (_, num) in zip(seqs, sequences, strict=True):
        if num:
            _offer(seq, num)
    chosen = Goodput(cost, objective).runs(seqs, Shape(len(seqs))).tolist()
    rates, caps = [rate for rate, _ in sequences], [num for _, num in sequences]
    assert all(n <= cap for n, cap in zip(chosen, caps, strict=True))
    choices = itertools.product(*[range(cap + 1) for cap in caps])
    best = max(_score(rates, nums, objective, cost) for nums in choices)
    assert _score(rates, chosen, objective, cost) == pytest.approx(best, rel=1e-9)


class Run:
    """A policy and sequences under it, whose drafts are right at a rate that may change."""

    def __init__(self, num: int, row: float, objective: Objective, seed: int) -> None:
        self.policy = Goodput(_cost(row), objective)
        self.seqs = [_sequence(sid + 1) for sid in range(num)]
        self.num_tested = 0
        self._rng = np.random.default_rng(seed)
        self._serial = itertools.count()

    def step(self, rate: float) -> None:
        """Drafts fill what they were told; the step tests what the policy takes."""
        for seq in self.seqs:
            seq.kill_chain("diverged")
            if seq.told_lookahead:
                _offer(seq, seq.told_lookahead, next(self._serial))
        shape = Shape(len(self.seqs))
        nums = self.policy.runs(self.seqs, shape).tolist()
        for seq, num in zip(self.seqs, nums, strict=True):
            waiting = len(seq.chain.drafts) if seq.chain else 0
            kept = self._rng.random(min(num + 1, waiting)) < rate  # the last row's is free
            accepted = int(np.argmin(kept)) if not kept.all() else len(kept)
            tested = min(len(kept), accepted + 1)
            self.num_tested += num
            self.policy.tested(seq, tested, accepted)
            seq.tokens += [0] * (accepted + 1)
        self.policy.tell(self.seqs)

    def mean_wanted(self, rate: float, num_steps: int) -> float:
        wanted = []
        for _ in range(num_steps):
            self.step(rate)
            wanted.append(np.mean([seq.num_wanted for seq in self.seqs]))
        return float(np.mean(wanted))


@pytest.mark.parametrize("objective", Objective)
def test_always_wrong_drafts_are_paused_and_probed(objective: Objective) -> None:
    run = Run(4, 0.05, objective, seed=1)
    for _ in range(60):
        run.step(0.0)
    run.num_tested, told = 0, []
    for _ in range(10 * PROBE_EVERY):
        run.step(0.0)
        told.append([seq.told_lookahead for seq in run.seqs])
    assert run.num_tested == 0  # no row is spent
    assert set(np.array(told).flatten().tolist()) == {0, 1}
    probes = np.array(told).sum(axis=0)
    assert (probes >= 9).all()
    assert (probes <= 11).all()


@pytest.mark.parametrize("objective", Objective)
def test_right_drafts_are_taken_whole(objective: Objective) -> None:
    run = Run(2, 0.02, objective, seed=2)
    assert run.mean_wanted(1.0, 60) > 0.7 * MAX_LOOKAHEAD


@pytest.mark.parametrize("num", [1, 8, 32])
@pytest.mark.parametrize(("before", "after"), [(0.95, 0.05), (0.05, 0.95), (0.9, 0.5)])
def test_the_lookahead_follows_a_switch_of_domain(
    num: int, before: float, after: float, show: Callable[[str], None]
) -> None:
    """Within so many steps the mean lookahead has gone most of the way to its new level."""
    ways = []
    for seed in range(20):
        run = Run(num, 0.02, Objective.THROUGHPUT, seed)
        run.mean_wanted(before, 60)
        old = run.mean_wanted(before, 60)
        run.mean_wanted(after, FOLLOWS_WITHIN)
        there = run.mean_wanted(after, 5)
        new = run.mean_wanted(after, 120)
        ways.append((old, there, new))
    old, there, new = np.mean(ways, axis=0)
    show(f"{num:2} sequences, {before} to {after}: {old:.1f} to {new:.1f}, after 20 {there:.1f}")
    assert abs(old - new) > 0.5
    assert abs(there - new) < 0.25 * abs(old - new) + 0.3


def test_the_lookahead_does_not_flutter() -> None:
    """Where drafting just pays, a sequence is not switched on and off all the time."""
    run = Run(1, 0.3, Objective.THROUGHPUT, seed=5)
    states = []
    for _ in range(400):
        run.step(0.33)
        states.append(run.seqs[0].num_wanted > 0)
    switches = int(np.abs(np.diff(np.array(states, int))).sum())
    assert switches < 120


def test_waiting_is_bounded_by_what_it_can_gain() -> None:
    policy = Goodput(_cost(), Objective.LATENCY)
    seq = _knowing(0.8)
    seq.decided_at, seq.num_wanted = 100.0, 4
    assert policy.hold_until(seq) == 0.0  # nothing is known of the draft yet
    seq.arrivals.turnaround, seq.arrivals.chance = 0.2, 1.0
    assert policy.hold_until(seq) == pytest.approx(100.3)
    seq.arrivals.turnaround = 0.7
    assert policy.hold_until(seq) == pytest.approx(100.8)  # 0.8 of a step is all it can gain
    seq.arrivals.turnaround = 0.81
    assert policy.hold_until(seq) == 0.0
    seq.arrivals.turnaround, seq.arrivals.chance = 0.2, 0.1
    assert policy.hold_until(seq) == 0.0  # it mostly says nothing


def test_further_tokens_are_waited_for_while_they_pay() -> None:
    policy = Goodput(_cost(), Objective.LATENCY)
    seq = _knowing(0.8)
    seq.decided_at, seq.num_wanted = 100.0, 4
    _offer(seq, 1)
    seq.arrivals.last_at, seq.arrivals.spacing = 100.2, 0.1
    assert policy.hold_until(seq) == pytest.approx(100.35)
    seq.arrivals.spacing = 0.5
    assert policy.hold_until(seq) == 0.0
    seq.arrivals.spacing = 0.1
    _offer(seq, 4, serial=1)
    assert policy.hold_until(seq) == 0.0  # all that is wanted has come


def test_fixed_takes_what_has_come() -> None:
    seqs = [_sequence(1, lookahead=3), _sequence(2)]
    _offer(seqs[0], 5)
    assert Fixed().runs(seqs, Shape(2)).tolist() == [3, 0]
    Fixed().tell(seqs)
    assert [s.told_lookahead for s in seqs] == [3, MAX_LOOKAHEAD]


def test_acceptance_forgets() -> None:
    acceptance = Acceptance(memory=0.5)
    assert acceptance.rate(0.3) == 0.3
    acceptance.learn(3, 2)
    assert acceptance.rate(0.5) == pytest.approx((0.75 + 0.25) / (1.75 + 0.5))
    assert not acceptance.kept_last
    for _ in range(30):
        acceptance.learn(1, 1)
    assert acceptance.rate(0.0) == pytest.approx(0.8, abs=1e-6)


def test_cost_follows_the_machine() -> None:
    cost = _cost(0.1)
    for _ in range(200):
        cost.observe(Shape(8), 3.4)  # twice what was measured at load
    assert float(cost.seconds(Shape(8))) == pytest.approx(3.4, rel=0.02)
    assert float(cost.seconds(Shape(1))) == pytest.approx(2.0, rel=0.3)
    falls = np.diff(cost.seconds(Shape(np.arange(1, 200))))
    assert (falls >= 0).all()


def test_cost_learns_a_bend_that_was_not_there_at_load() -> None:
    knots = np.array([1, 2, 4, 8, 16, 32, 64])
    cost = StepCost(knots, np.ones(7), 0.0, 0.0)
    rng = np.random.default_rng(0)
    for _ in range(3000):
        rows = int(rng.integers(1, 65))
        cost.observe(Shape(rows), 1.0 if rows <= 16 else 3.0)
    small, large = cost.seconds(Shape(np.array([4, 48])))
    assert large / small == pytest.approx(3.0, rel=0.15)


def test_prompt_rows_within_a_time() -> None:
    cost = StepCost(np.array([1, 2]), np.ones(2), prompt_row=0.01, position=0.0001)
    assert cost.prompt_rows_within(1.0, 0) == 100
    assert cost.prompt_rows_within(1.0, 100) == 50
