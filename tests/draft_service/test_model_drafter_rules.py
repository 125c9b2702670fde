"""What the model drafter draws and tells under each rule, and when the model has no numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from common.engine.block_manager import BlockManager
from common.engine.noise import Domain, GumbelNoise, NoiseKeys
from common.engine.sampling import RowParams, log_probs_
from common.types import Commit, OpenSequence, Proposal, Rule, SamplingParams
from draft_service.drafters.model import ModelDrafter
from target_service.engine import TargetEngine
from tests.counting import counting_table
from tests.driver import Driver, HookedModel, Script
from tests.models import TableModel

# A law of order one over 80 tokens, different at each of four positions.
FLAT = torch.randn(4, 80, 80, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def _tokens(proposals: list[Proposal]) -> list[int]:
    return [t for p in proposals for t in p.token_ids]


def _draw(
    table: Tensor, *params: SamplingParams, support: int = 32, lookahead: int = 4
) -> dict[int, list[Proposal]]:
    """One sequence for each of params, from token 1."""
    drafter = ModelDrafter(TableModel(table), BlockManager(64, 4), support=support)
    for sid, p in enumerate(params):
        drafter.open(OpenSequence(sid, (1,), 1, p, lookahead))
    found: dict[int, list[Proposal]] = {sid: [] for sid in range(len(params))}
    while drafter.has_work():
        for proposal in drafter.step():
            found[proposal.sequence_id].append(proposal)
    return found


@pytest.mark.parametrize("support", [1, 5, 32])
def test_under_rejection_q_is_told_as_it_was_sampled_from(support: int) -> None:
    params = [SamplingParams(temperature=2.0, rule=Rule.REJECTION, seed=i) for i in range(20)]
    found = _draw(FLAT, *params, support=support)
    for seed, proposals in found.items():
        last = 1
        for position, p in enumerate(proposals):
            (dist,), (token,) = p.distributions, p.token_ids
            assert len(dist.token_ids) == support
            assert token in dist.token_ids
            assert abs(dist.probs.sum() - 1) < 1e-12
            logits = FLAT[position % 4, last][None].clone()
            whole = log_probs_(logits, RowParams.of(params[:1], np.array([1])))[0].exp()
            best = whole[torch.from_numpy(dist.token_ids)]
            assert best.min() >= whole.sort().values[-support]
            np.testing.assert_allclose(dist.probs, best / best.sum(), rtol=1e-12)
            log_q = torch.full((1, 80), -torch.inf, dtype=torch.float64)
            log_q[0, torch.from_numpy(dist.token_ids)] = torch.from_numpy(dist.probs).log()
            keys = NoiseKeys(np.array([seed], np.uint64), np.array([position + 1]))
            assert token == int(GumbelNoise().choose(keys, Domain.DRAFT, log_q))
            last = token
    drawn = {tuple(_tokens(proposals)) for proposals in found.values()}
    assert len(drawn) > 1 or support == 1


def test_filters_narrow_q() -> None:
    params = SamplingParams(top_k=3, rule=Rule.REJECTION)
    for p in _draw(FLAT, params)[0]:
        assert len(p.distributions[0].token_ids) == 3


def test_rules_in_one_batch_equal_themselves_alone() -> None:
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(rule=Rule.REJECTION, seed=1),
        SamplingParams(seed=2),
        SamplingParams(temperature=0.5, rule=Rule.REJECTION, top_p=0.7, seed=3),
    ]
    together = _draw(FLAT, *params)
    for sid, p in enumerate(params):
        assert _tokens(together[sid]) == _tokens(_draw(FLAT, p)[0])
        has_q = p.rule is Rule.REJECTION
        assert [len(x.distributions) for x in together[sid]] == [has_q] * 4


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_coupled_with_itself_a_draft_draws_the_target_s_tokens(temperature: float) -> None:
    params = [SamplingParams(temperature=temperature, max_tokens=13, seed=i) for i in range(5)]
    found = _draw(FLAT, *params, lookahead=12)
    model = HookedModel(TableModel(FLAT))
    target = Driver(TargetEngine(model, BlockManager(64, 4)), model, None, Script())
    texts = target.run([OpenSequence(sid, (1,), 1, p) for sid, p in enumerate(params)])
    for sid, text in texts.items():
        assert _tokens(found[sid]) == text[:12]


def test_rows_without_numbers_end_the_drafting_of_their_sequence_only() -> None:
    drafter = ModelDrafter(TableModel(counting_table((5,))), BlockManager(64, 4))
    for sid, first in enumerate((3, 20)):
        params = SamplingParams(temperature=0.0)
        drafter.open(OpenSequence(sid, (first,), 1, params, lookahead=4))
    drawn: dict[int, list[int]] = {0: [], 1: []}
    while drafter.has_work():
        for p in drafter.step():
            drawn[p.sequence_id] += p.token_ids
    assert drawn == {0: [4, 5], 1: [21, 22, 23, 24]}
    drafter.commit(Commit(0, 1, (7,), 4))  # from here there would be numbers
    assert not drafter.has_work()
    drafter.commit(Commit(1, 1, (21,), 4))
    assert [p.token_ids for p in drafter.step()] == [(25,)]


def test_when_no_row_has_numbers_nothing_is_drawn() -> None:
    assert _draw(counting_table((1,)), SamplingParams(temperature=0.0), SamplingParams()) == {
        0: [],
        1: [],
    }
