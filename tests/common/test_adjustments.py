"""What a text makes of the next logits, against the definition written anew in plain numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.engine.adjustments import Adjustments, RowEdit, adjust_, check_ids, end_ids_of
from common.errors import InvalidRequestError
from common.types import FloatArray, SamplingParams, Tokens

V = 12
TOKENS = st.lists(st.integers(0, V - 1), max_size=30).map(tuple)
SOME_PARAMS = st.builds(
    lambda bias, **kwargs: SamplingParams(logit_bias=tuple(bias.items()), **kwargs),
    bias=st.dictionaries(st.integers(0, V - 1), st.floats(-100, 100), max_size=4),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.5, 1.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 0.75, -1.5]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.3, -2.0]),
    min_tokens=st.integers(0, 12),
    stop_token_ids=st.lists(st.integers(0, V - 1), max_size=2).map(tuple),
    ignore_eos=st.booleans(),
)
EOS = (5,)


def _oracle(logits: FloatArray, p: SamplingParams, prompt: Tokens, output: Tokens) -> FloatArray:
    x = logits.copy()
    for token, bias in p.logit_bias:
        x[token] += bias
    for token in range(V):
        if token in prompt + output:
            x[token] = (
                x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
            )
        if token in output:
            x[token] -= p.presence_penalty + p.frequency_penalty * output.count(token)
        ends = token in p.stop_token_ids or (token in EOS and not p.ignore_eos)
        if ends and len(output) < p.min_tokens:
            x[token] = -np.inf
    return x


def _of(p: SamplingParams, prompt: Tokens, output: Tokens = ()) -> Adjustments | None:
    return Adjustments.of(p, prompt + output, len(prompt), end_ids_of(p, EOS))


def _adjusted(logits: FloatArray, adjustments: Adjustments | None) -> FloatArray:
    x = torch.from_numpy(logits.copy())[None]
    edit = adjustments.edit() if adjustments else None
    adjust_(x, {0: edit} if edit else {})
    return x[0].numpy()


def _logits(seed: int) -> FloatArray:
    return np.random.default_rng(seed).normal(scale=3.0, size=V)


@given(SOME_PARAMS, TOKENS, TOKENS, st.integers(0, 99))
def test_equals_the_definition(
    params: SamplingParams, prompt: Tokens, output: Tokens, seed: int
) -> None:
    found = _adjusted(_logits(seed), _of(params, prompt, output))
    expected = _oracle(_logits(seed), params, prompt, output)
    np.testing.assert_allclose(found, expected, rtol=1e-14, atol=1e-14)


CHANGES = st.lists(TOKENS | st.integers(0, 10), max_size=8)


@given(SOME_PARAMS, TOKENS, CHANGES, TOKENS, st.integers(0, 99))
def test_a_text_that_grew_and_shrank_equals_one_read_at_once(
    params: SamplingParams, prompt: Tokens, changes: list[Tokens | int], ahead: Tokens, seed: int
) -> None:
    """So do the rows of a run, bit for bit; and looking along a run leaves no trace."""
    adjustments = _of(params, prompt)
    if adjustments is None:
        return
    output: Tokens = ()
    for change in changes:
        if isinstance(change, int):
            output = output[: max(0, len(output) - change)]
            adjustments.truncate(len(prompt) + len(output))
        else:
            output += change
            adjustments.append(change)
    for _ in range(2):
        along = adjustments.edits_along(list(ahead))
        rows = torch.from_numpy(_logits(seed)).repeat(len(along), 1)
        adjust_(rows, {i: edit for i, edit in enumerate(along) if edit})
        for i, row in enumerate(rows.numpy()):
            fresh = _adjusted(_logits(seed), _of(params, prompt, output + ahead[:i]))
            assert np.array_equal(row, fresh)


@pytest.mark.parametrize(
    "changes", [{}, {"top_k": 3, "top_p": 0.5}, {"min_tokens": 4, "ignore_eos": True}]
)
def test_what_changes_nothing_is_not_kept(changes: dict[str, Any]) -> None:
    assert _of(SamplingParams(**changes), (1, 2, 3)) is None


def test_a_row_changes_where_it_must_and_no_more() -> None:
    """The prompt matters to repetition alone; ends are forbidden until the text is long enough."""
    prompt, penalised = (1, 2, 2), SamplingParams(frequency_penalty=0.5, min_tokens=2)
    adjustments = _of(penalised, prompt)
    assert adjustments is not None
    ids, taken = [], []
    for token in (7, 7, 8):
        edit = adjustments.edit()
        assert edit is not None
        ids.append(edit.ids.tolist())
        taken.append(edit.taken.tolist())
        adjustments.append((token,))
    assert ids == [[5], [5, 7], [7]]
    assert taken == [[np.inf], [np.inf, 0.5], [1.0]]
    repeated = _of(SamplingParams(repetition_penalty=2.0), prompt)
    assert repeated is not None
    edit = repeated.edit()
    assert edit is not None
    assert sorted(edit.ids.tolist()) == [1, 2]


def test_min_tokens_alone_costs_nothing_once_there_are_enough() -> None:
    adjustments = _of(SamplingParams(min_tokens=2), (1,), (2,))
    assert adjustments is not None
    assert adjustments.edit() is not None
    adjustments.append((3,))
    assert adjustments.edit() is None


def test_rows_and_ids_that_no_edit_names_stay_as_they_are() -> None:
    """In the logits' own precision; a forbidden NaN stays one, so that it is found."""
    x = torch.tensor([[1.0, -1.0, 2.0], [1.0, torch.nan, -torch.inf], [4.0, 5.0, 6.0]])
    one, none = np.ones(2), np.zeros(2)
    edits = {
        0: RowEdit(np.array([2, 1]), 0.5 * one, 2.0 * one, 0.25 * one),
        1: RowEdit(np.array([1, 2]), none, one, np.array([np.inf, 3.0])),
    }
    adjust_(x, edits)
    assert x[0].tolist() == [1.0, -1.25, 1.0]
    assert x[1, 0] == 1.0
    assert torch.isnan(x[1, 1])
    assert x[1, 2] == -torch.inf
    assert x[2].tolist() == [4.0, 5.0, 6.0]


def test_logits_of_inference_mode_can_be_adjusted() -> None:
    """As models make them."""
    with torch.inference_mode():
        x = torch.zeros(1, 3)
    adjust_(x, {0: RowEdit(np.array([1]), np.array([2.0]), np.ones(1), np.zeros(1))})
    assert x.tolist() == [[0.0, 2.0, 0.0]]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(logit_bias=((3, 1.0), (V, 1.0))), f"sampling.logit_bias[{V}]"),
        (SamplingParams(stop_token_ids=(1, V)), "sampling.stop_token_ids[1]"),
        (SamplingParams(stop_token_ids=(-1,)), "sampling.stop_token_ids[0]"),
        (SamplingParams(min_tokens=1, stop_token_ids=tuple(range(V))), "sampling.min_tokens"),
    ],
)
def test_ids_that_the_model_lacks_are_refused(params: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check_ids(params, end_ids_of(params, EOS), V)
    assert caught.value.field == field
    fine = replace(params, logit_bias=((V - 1, 1.0),), stop_token_ids=(V - 1,))
    check_ids(fine, end_ids_of(fine, EOS), V)
