"""The sampler against its definition, written anew in plain numpy: sort, cut, renormalise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from common.engine.sampling import (
    TOP_P_CANDIDATES,
    RowParams,
    log_probs_,
    sparsify,
    unusable_rows,
)
from common.types import FloatArray, Rule, SamplingParams

PARAMS = {
    "greedy": SamplingParams(temperature=0.0, top_k=1, top_p=0.5, min_p=0.5),
    "plain": SamplingParams(temperature=1.0),
    "warm": SamplingParams(temperature=1.7),
    "min_p": SamplingParams(temperature=0.7, min_p=0.2),
    "top_k": SamplingParams(temperature=1.3, top_k=3),
    "top_p": SamplingParams(temperature=2.0, top_p=0.8),
    "all": SamplingParams(temperature=1.5, min_p=0.01, top_k=40, top_p=0.9),
    "rejection": SamplingParams(temperature=1.2, top_k=50, top_p=0.7, rule=Rule.REJECTION),
    "no-op": SamplingParams(temperature=1.0, top_k=10**6, top_p=1.0, min_p=0.0),
}


def _rows(*params: SamplingParams) -> RowParams:
    return RowParams.of(params, np.ones(len(params), np.int64))


def _p(logits: FloatArray, params: SamplingParams) -> FloatArray:
    """What is tested, as probabilities."""
    log_p = log_probs_(torch.tensor(logits)[None], _rows(params))[0]
    if params.rule is Rule.REJECTION:
        return log_p.exp().numpy()
    return torch.softmax(log_p, dim=-1).numpy()  # up to a constant


def _oracle(logits: FloatArray, params: SamplingParams) -> tuple[FloatArray, float]:
    """The definition, and how close the closest call was."""
    w = np.exp(logits / params.temperature)
    w /= w.sum()
    margin = np.inf
    if params.min_p > 0:
        least = params.min_p * w.max()
        margin = np.abs(w - least).min()
        w[w < least] = 0.0
    if 0 < params.top_k < len(w):
        w[w < np.sort(w)[-params.top_k]] = 0.0
    w /= w.sum()
    if params.top_p < 1:
        best = np.sort(w)[::-1]
        mass = np.cumsum(best)
        margin = min(margin, np.abs(mass - params.top_p).min())
        num_short = int((mass < params.top_p).sum())
        w[w < best[num_short]] = 0.0
    return w / w.sum(), margin


# Quarters tie often, and equal logits give equal numbers on both sides.
LOGITS = st.lists(st.integers(-20, 20), min_size=1, max_size=40).map(
    lambda quarters: np.array(quarters, np.float64) / 4
)
SOME_PARAMS = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 5.0),
    top_k=st.integers(0, 45),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    min_p=st.just(0.0) | st.floats(0.001, 0.95),
)


@given(LOGITS, SOME_PARAMS)
def test_equals_the_definition(logits: FloatArray, params: SamplingParams) -> None:
    expected, margin = _oracle(logits, params)
    assume(margin > 1e-9)  # else rounding decides
    found = _p(logits, params)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(
    ("p", "params", "expected"),
    [
        # Top_p acts on what min_p left: .5 of .8 is .625, enough for .6; .5 of 1 is not.
        ([0.5, 0.3, 0.1, 0.1], SamplingParams(min_p=0.5, top_p=0.6), [1, 0, 0, 0]),
        # So it does on what top_k left.
        ([0.5, 0.3, 0.2, 1e-9], SamplingParams(top_k=2, top_p=0.6), [1, 0, 0, 0]),
        # Temperature goes first: at 2 the odds of 4 to 1 are 2 to 1, which min_p .4 lets pass.
        ([0.8, 0.2], SamplingParams(temperature=2.0, min_p=0.4), [2 / 3, 1 / 3]),
        ([0.8, 0.2], SamplingParams(min_p=0.4), [1, 0]),
        # The token that completes the mass is kept.
        ([0.5, 0.3, 0.2], SamplingParams(top_p=0.51), [0.625, 0.375, 0]),
        # A tiny top_p still leaves the likeliest.
        ([0.5, 0.3, 0.2], SamplingParams(top_p=1e-9), [1, 0, 0]),
        # What ties with the last one kept is kept, whatever its id.
        ([0.2, 0.4, 0.2, 0.2], SamplingParams(top_k=2), [0.2, 0.4, 0.2, 0.2]),
        ([0.2, 0.4, 0.2, 0.2], SamplingParams(top_p=0.5), [0.2, 0.4, 0.2, 0.2]),
        ([0.4, 0.4, 0.2], SamplingParams(top_k=1), [0.5, 0.5, 0]),
    ],
)
def test_worked_cases(p: list[float], params: SamplingParams, expected: list[float]) -> None:
    np.testing.assert_allclose(_p(np.log(p), params), expected, atol=1e-15)


def test_greedy_rows_are_raw_logits() -> None:
    """Only their argmax matters, so nothing is computed."""
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    greedy, top_k = PARAMS["greedy"], replace(PARAMS["top_k"], rule=Rule.REJECTION)
    assert torch.equal(log_probs_(logits, _rows(greedy, greedy, greedy)), before)
    mixed = log_probs_(logits, _rows(greedy, top_k, greedy))
    assert torch.equal(mixed[[0, 2]], before[[0, 2]])
    assert mixed[1].exp().sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("num_better", [0, 3])
def test_top_p_beyond_its_candidates_is_exact(num_better: int) -> None:
    """Flat over 5,000 ids: 1,024 candidates hold a fifth of the mass, so all are sorted."""
    logits = np.zeros(5000)
    logits[:num_better] = 1.0
    logits -= 1e-4 * np.arange(5000)  # no ties
    params = SamplingParams(top_p=0.9)
    expected, _ = _oracle(logits, params)
    assert (expected > 0).sum() > 4 * TOP_P_CANDIDATES[-1]
    found = _p(logits, params)
    assert ((found > 0) == (expected > 0)).all()
    np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_a_flat_row_keeps_every_tie() -> None:
    assert (_p(np.zeros(5000), SamplingParams(top_p=0.9)) > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_rows_do_not_depend_on_their_batch(dtype: torch.dtype) -> None:
    """Every kind of row in one batch, peaked and flat, equals itself alone bit for bit."""
    generator = torch.Generator().manual_seed(1)
    params = [*PARAMS.values()] * 2
    scale = torch.tensor([4.0] * len(PARAMS) + [0.01] * len(PARAMS))
    logits = (torch.randn(len(params), 3000, generator=generator) * scale[:, None]).to(dtype)
    together = log_probs_(logits.clone(), _rows(*params))
    assert together.dtype == torch.promote_types(dtype, torch.float32)
    for i, p in enumerate(params):
        assert torch.equal(together[i], log_probs_(logits[i : i + 1].clone(), _rows(p))[0]), p


def test_parameters_are_repeated_for_each_row() -> None:
    rows = RowParams.of([PARAMS["greedy"], PARAMS["all"]], np.array([1, 2]))
    assert rows.greedy.tolist() == [True, False, False]
    assert rows.temperature.tolist() == [1.0, 1.5, 1.5]
    assert rows.top_k.tolist() == [1, 40, 40]
    assert rows.top_p.tolist() == [0.5, 0.9, 0.9]
    assert rows.min_p.tolist() == [0.5, 0.01, 0.01]


def test_sparsify_keeps_the_likeliest_and_renormalises() -> None:
    p = torch.tensor([[0.1, 0.4, 0.2, 0.3], [0.0, 1.0, 0.0, 0.0]])
    first, second = sparsify(p.log(), 2)
    assert first.token_ids.tolist() == [1, 3]
    np.testing.assert_allclose(first.probs, [4 / 7, 3 / 7], rtol=1e-7)
    assert first.probs.dtype == np.float64
    assert (second.token_ids.tolist(), second.probs.tolist()) == ([1], [1.0])


@given(LOGITS, st.integers(1, 50))
def test_what_sparsify_yields_is_a_distribution(logits: FloatArray, support: int) -> None:
    """In float32, as a draft has it: the sum is 1 as closely as a target asks for."""
    log_p = torch.log_softmax(torch.from_numpy(logits).float(), dim=0)
    (dist,) = sparsify(log_p[None], support)
    assert len(set(dist.token_ids.tolist())) == len(dist.token_ids) <= support
    assert (dist.probs > 0).all()
    assert abs(dist.probs.sum() - 1) < 1e-12
    assert logits[dist.token_ids].min() >= np.sort(logits)[-min(support, len(logits))]


def test_unusable_rows() -> None:
    inf, nan = torch.inf, torch.nan
    rows = torch.tensor([[0.0, 1.0], [0.0, -inf], [0.0, nan], [inf, 0.0], [-inf, -inf]])
    assert unusable_rows(rows).tolist() == [False, False, True, True, True]
