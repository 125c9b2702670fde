"""Every rule, worked by hand: noise comes from a script, so each decision is foreseeable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.noise import Domain, NoiseKeys
from common.engine.sampling import likeliest
from common.types import Rule, SparseDist
from target_service.acceptance import NO_DRAFT, DraftRuns, accept

GREEDY, REJECTION, COUPLED = Rule.GREEDY, Rule.REJECTION, Rule.COUPLED
A, B, C = 0, 1, 2  # the whole vocabulary
NONE = NO_DRAFT


@dataclass
class ScriptedNoise:
    """Answers by position; remembers what it was asked to choose from.

    Under COUPLED `token` is what the target draws. Whatever else is drawn comes from
    `residual`, whose tokens must have weight.
    """

    r: Mapping[int, float] = field(default_factory=dict)
    token: Mapping[int, int] = field(default_factory=dict)
    residual: Mapping[int, int] = field(default_factory=dict)
    weights: dict[int, list[float]] = field(default_factory=dict)

    def keep(self, keys: NoiseKeys, p: Tensor, q: Tensor) -> Tensor:
        return torch.tensor([self.r[i] for i in keys.positions.tolist()]).to(p) * q < p

    def choose(
        self, keys: NoiseKeys, domain: Domain, log_w: Tensor, likeliest: Tensor | None = None
    ) -> Tensor:
        if domain is Domain.TOKEN:
            return torch.tensor([self.token[i] for i in keys.positions.tolist()])
        assert domain is Domain.RESIDUAL
        chosen = [self.residual[i] for i in keys.positions.tolist()]
        for i, row, x in zip(keys.positions.tolist(), log_w.exp(), chosen, strict=True):
            assert row[x] > 0
            self.weights[i] = (row / row.sum()).tolist()
        return torch.tensor(chosen)

    def likeliest(self, x: Tensor) -> Tensor:
        return likeliest(x)


@dataclass(frozen=True)
class Run:
    """One sequence: p of every row and the token to test there; its rows are positions."""

    rule: Rule
    draft: list[int]
    p: list[list[float]]
    q: list[list[float] | None] = field(default_factory=list)
    first: int = 10


@dataclass(frozen=True)
class Outcome:
    """What one sequence got."""

    emitted: list[int]
    num_tested: int
    num_accepted: int


def _dense(q: list[float]) -> SparseDist:
    ids = np.flatnonzero(q)
    return SparseDist(ids, np.array(q)[ids])


def _accept(noise: ScriptedNoise, *runs: Run) -> list[Outcome]:
    num_rows = [len(run.p) for run in runs]
    starts = np.concatenate([[0], np.cumsum(num_rows)])
    q = [q for run in runs for q in (run.q or [None] * len(run.p))]
    batch = DraftRuns(
        row_start=starts,
        rules=[run.rule for run in runs],
        seeds=np.zeros(len(runs), np.uint64),
        start=np.array([run.first for run in runs]),
        draft=np.array([x for run in runs for x in run.draft], np.int64),
        dists={i: _dense(dist) for i, dist in enumerate(q) if dist},
    )
    p = torch.tensor([row for run in runs for row in run.p], dtype=torch.float64)
    found = accept(p.log(), batch, noise)
    return [
        Outcome(
            found.tokens[starts[i] : starts[i] + found.num_emitted[i]].tolist(),
            int(found.num_tested[i]),
            int(found.num_accepted[i]),
        )
        for i in range(len(runs))
    ]


# Rows whose argmax is A, B, C, A; under COUPLED the target draws these by script.
P = [[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.2, 0.7], [0.8, 0.1, 0.1]]
OWN = dict(zip(range(10, 14), [A, B, C, A], strict=True))
RUNS = {
    "no draft": ([NONE], Outcome([A], 0, 0)),
    "only a late token, kept": ([A], Outcome([A], 1, 1)),
    "only a late token, rejected": ([C], Outcome([A], 1, 0)),
    "all kept, then the bonus": ([A, B, C, NONE], Outcome([A, B, C, A], 3, 3)),
    "all kept, and the late token": ([A, B, C, A], Outcome([A, B, C, A], 4, 4)),
    "all kept but the late token": ([A, B, C, B], Outcome([A, B, C, A], 4, 3)),
    "first rejected": ([B, B, C, A], Outcome([A], 1, 0)),
    "middle rejected": ([A, A, C, A], Outcome([A, B], 2, 1)),
    "last rejected": ([A, B, B, NONE], Outcome([A, B, C], 3, 2)),
}


@pytest.mark.parametrize("rule", [GREEDY, COUPLED])
@pytest.mark.parametrize("case", RUNS)
def test_the_target_decides_by_itself(case: str, rule: Rule) -> None:
    """GREEDY and COUPLED: keep a guess iff it is the target's own token, emit that either way."""
    draft, expected = RUNS[case]
    run = Run(rule, draft, P[: len(draft)])
    assert _accept(ScriptedNoise(token=OWN), run) == [expected]


@pytest.mark.parametrize("case", RUNS)
def test_rejection_with_one_hot_guesses(case: str) -> None:
    """Without q a guess passes iff r < p(x); the residual is p without it."""
    draft, expected = RUNS[case]
    right = [A, B, C, A]
    # r between p of the wrong tokens (.3 at most) and p of the right ones (.5 at least).
    noise = ScriptedNoise(r=dict.fromkeys(range(10, 14), 0.4), residual=OWN)
    assert _accept(noise, Run(REJECTION, draft, P[: len(draft)])) == [expected]
    last = len(expected.emitted) - 1
    if draft[last] == NONE:
        assert noise.weights == {10 + last: pytest.approx(P[last])}
    elif draft[last] != right[last]:
        rest = [0.0 if v == draft[last] else P[last][v] for v in range(3)]
        assert noise.weights == {10 + last: pytest.approx(np.array(rest) / sum(rest))}
    else:
        assert noise.weights == {}


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    run = Run(GREEDY, [B, NONE], [[0.4, 0.4, 0.2], [0.2, 0.4, 0.4]])
    assert _accept(ScriptedNoise(), run) == [Outcome([A], 1, 0)]


@pytest.mark.parametrize(("r", "kept"), [(0.49, True), (0.5, False), (0.51, False)])
def test_rejection_keeps_with_probability_p_over_q(r: float, kept: bool) -> None:
    """p(B) = .3, q(B) = .6: kept iff r < .5. The residual of p - q is A .2, C .1."""
    run = Run(REJECTION, [B], [[0.4, 0.3, 0.3]], [[0.2, 0.6, 0.2]])
    noise = ScriptedNoise(r={10: r}, residual={10: C})
    assert _accept(noise, run) == [Outcome([B] if kept else [C], 1, int(kept))]
    assert noise.weights == ({} if kept else {10: pytest.approx([2 / 3, 0.0, 1 / 3])})


def test_what_the_target_finds_likelier_always_passes() -> None:
    run = Run(REJECTION, [A], [[0.6, 0.3, 0.1]], [[0.5, 0.5, 0.0]])
    assert _accept(ScriptedNoise(r={10: 1 - 1e-15}), run) == [Outcome([A], 1, 1)]


@pytest.mark.parametrize("q", [None, [0.0, 0.5, 0.5]])
def test_a_banned_token_never_passes(q: list[float] | None) -> None:
    """r = 0 is not drawn, but even then p(x) = 0 is not enough."""
    run = Run(REJECTION, [C], [[0.7, 0.3, 0.0]], [q])
    assert _accept(ScriptedNoise(r={10: 0.0}, residual={10: A}), run) == [Outcome([A], 1, 0)]


def test_where_p_is_q_nothing_is_left_and_p_steps_in() -> None:
    """Rejecting has probability zero then; rounding may still do it, and p is right."""
    p = [0.5, 0.3, 0.2]
    noise = ScriptedNoise(r={10: 2.0}, residual={10: B})
    assert _accept(noise, Run(REJECTION, [A], [p], [p])) == [Outcome([B], 1, 0)]
    assert noise.weights == {10: pytest.approx(p)}


def test_rejection_with_a_whole_run_of_qs() -> None:
    q = [[0.9, 0.1, 0.0], [0.0, 0.9, 0.1], [0.1, 0.9, 0.0], None]
    run = Run(REJECTION, [A, B, B, NONE], P, list(q))
    noise = ScriptedNoise(r={10: 0.66, 11: 0.55, 12: 0.23}, residual={12: C})
    # p/q: .6/.9 and .5/.9 pass; .2/.9 = .222 does not, p - q leaves C alone.
    assert _accept(noise, run) == [Outcome([A, B, C], 3, 2)]
    assert noise.weights == {12: pytest.approx([0.0, 0.0, 1.0])}


MIXED = [
    Run(GREEDY, [A, A, NONE], P[:3], first=10),
    Run(REJECTION, [B, C, NONE], P[:3], [[0.5, 0.5, 0.0], None, None], first=20),
    Run(COUPLED, [C, C], P[:2], first=30),
    Run(REJECTION, [NONE], P[3:], first=40),
    Run(GREEDY, [A, B, C, NONE], P, first=50),
    Run(COUPLED, [NONE], P[:1], first=60),
]
EXPECTED = [
    Outcome([A, B], 2, 1),
    Outcome([B, A], 2, 1),
    Outcome([C, A], 2, 1),
    Outcome([C], 0, 0),
    Outcome([A, B, C, A], 3, 3),
    Outcome([B], 0, 0),
]


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 4, 0, 5, 1, 3]])
def test_all_rules_in_one_batch_in_any_order(order: list[int]) -> None:
    noise = ScriptedNoise(
        r={20: 0.59, 21: 0.31}, token={30: C, 31: A, 60: B}, residual={21: A, 40: C}
    )
    found = _accept(noise, *[MIXED[i] for i in order])
    assert found == [EXPECTED[i] for i in order]
    assert noise.weights == {
        21: pytest.approx([2 / 7, 5 / 7, 0.0]),
        40: pytest.approx([0.8, 0.1, 0.1]),
    }
