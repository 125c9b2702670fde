"""The model drafter's own bias, penalties and min_tokens: they follow its chain."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.block_manager import BlockManager
from common.types import Commit, OpenSequence, Proposal, Rule, SamplingParams
from draft_service.drafters.model import ModelDrafter
from target_service.engine import TargetEngine
from tests.driver import Driver, HookedModel, Script
from tests.models import VOCAB, TableModel
from tests.params import EOS, HISTORY, VARIANTS

# A law of order one, rather flat: what was said decides what is said next.
TABLE = torch.randn(4, VOCAB, VOCAB, generator=torch.Generator().manual_seed(2)).double()
PROMPT = (5, 9, 5)


def _drafter(table: torch.Tensor = TABLE, support: int = 32) -> ModelDrafter:
    return ModelDrafter(
        TableModel(table), BlockManager(64, 4), eos_token_ids=(EOS,), support=support
    )


def _open(
    params: SamplingParams, output: tuple[int, ...] = (), lookahead: int = 12
) -> OpenSequence:
    return OpenSequence(1, PROMPT + output, len(PROMPT), params, lookahead)


def _draw(drafter: ModelDrafter) -> list[Proposal]:
    found = []
    while drafter.has_work():
        found += drafter.step()
    return found


def _tokens(proposals: list[Proposal]) -> list[int]:
    return [t for p in proposals for t in p.token_ids]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_draft_draws_the_tokens_of_a_target_with_its_model(
    variant: str, temperature: float
) -> None:
    kwargs = {"max_tokens": 13, "seed": 3, **VARIANTS[variant], "temperature": temperature}
    params = SamplingParams(**kwargs)
    drafter = _drafter()
    drafter.open(_open(params))
    hooked = HookedModel(TableModel(TABLE))
    engine = TargetEngine(hooked, BlockManager(64, 4), eos_token_ids=(EOS,))
    text = Driver(engine, hooked, None, Script()).run([_open(params, lookahead=0)])[1]
    drawn = _tokens(_draw(drafter))
    assert len(drawn) == 12
    assert drawn[: len(text)] == text[:12]


TOKENS = st.lists(st.integers(2, 20), min_size=1, max_size=4)


@given(
    variant=st.sampled_from(HISTORY),
    agreeing=st.lists(st.integers(0, 3), max_size=4),
    decided=st.lists(TOKENS, min_size=4, max_size=4),
)
def test_after_any_commits_it_draws_as_if_opened_anew(
    variant: str, agreeing: list[int], decided: list[list[int]]
) -> None:
    """Each commit repeats some of the chain and then goes its own way, or past the tip."""
    params = SamplingParams(**{"max_tokens": 60, "seed": 3, **VARIANTS[variant]})
    drafter, output = _drafter(), tuple[int, ...]()
    drafter.open(_open(params, lookahead=4))
    chain: list[int] = _tokens(_draw(drafter))
    for num, own in zip(agreeing, decided, strict=False):
        text = chain[:num] + own
        drafter.commit(Commit(1, len(PROMPT) + len(output), tuple(text), 4))
        output += tuple(text)
        ahead = chain[len(text) :] if chain[: len(text)] == text else []
        fresh = _drafter()
        fresh.open(_open(params, output, lookahead=4))
        chain = ahead + _tokens(_draw(drafter))
        assert chain == _tokens(_draw(fresh))


def test_under_rejection_q_is_the_adjusted_distribution() -> None:
    """Along the chain: bias, then repetition over prompt and output, frequency over output."""
    params = SamplingParams(
        rule=Rule.REJECTION,
        logit_bias=((7, 3.0),),
        repetition_penalty=1.5,
        frequency_penalty=1.0,
        min_tokens=2,
    )
    drafter = _drafter(support=VOCAB)
    drafter.open(_open(params, (7,), lookahead=5))
    output = [7]
    for p in _draw(drafter):
        last = output[-1]
        x = TABLE[(len(PROMPT) + len(output) - 1) % 4, last].numpy().copy()
        x[7] += 3.0
        for token in {*PROMPT, *output}:
            x[token] = x[token] / 1.5 if x[token] > 0 else x[token] * 1.5
        for token in output:
            x[token] -= 1.0
        if len(output) < 2:
            x[EOS] = -np.inf
        q = np.exp(x) / np.exp(x).sum()
        (dist,) = p.distributions
        np.testing.assert_allclose(dist.probs, q[dist.token_ids], rtol=1e-12)
        assert (EOS in dist.token_ids) == (len(output) >= 2)
        output += p.token_ids
    assert len(output) == 6


def test_ids_that_the_draft_s_model_lacks_are_passed_over() -> None:
    """A target's vocabulary may be the larger."""
    params = SamplingParams(seed=1, min_tokens=3, frequency_penalty=0.5)
    more = replace(
        params, logit_bias=((VOCAB, 5.0), (VOCAB + 9, -5.0)), stop_token_ids=(VOCAB + 1,)
    )
    drawn = []
    for p in (params, more):
        drafter = _drafter()
        drafter.open(_open(p))
        drawn.append(_tokens(_draw(drafter)))
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 1, "stop_token_ids": tuple(range(VOCAB))},
        {"repetition_penalty": 1e-320, "logit_bias": ((PROMPT[0], 10.0),)},
    ],
    ids=["all forbidden", "overflow"],
)
def test_where_sampling_leaves_nothing_only_that_sequence_is_not_drafted(
    changes: dict[str, Any],
) -> None:
    drafter = _drafter()
    drafter.open(_open(SamplingParams(temperature=0.0), lookahead=2))
    nothing = SamplingParams(**{"temperature": 0.0, **changes})
    drafter.open(replace(_open(nothing, lookahead=2), sequence_id=2))
    assert [p.sequence_id for p in _draw(drafter)] == [1, 1]
