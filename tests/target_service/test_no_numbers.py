"""Rows that leave nothing to choose from end their own sequence, whatever brought it about."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor

from common.engine.batch import Output, RaggedBatch
from common.engine.block_manager import BlockManager
from common.types import OpenSequence, SamplingParams, Verdict
from target_service.engine import TargetEngine
from tests.counting import House, open_sequence, piece
from tests.driver import HookedModel
from tests.models import TableModel, paged

INTERNAL = grpc.StatusCode.INTERNAL.value[0]
LONG = tuple(range(2, 42))
AT = 45  # no other text gets this long


class Faulty(HookedModel):
    """Says NaN, or something else without numbers, after the token at one position."""

    def __init__(self, fault: Callable[[Tensor], None]) -> None:
        super().__init__(paged("llama"))
        self._fault = fault

    def forward(self, batch: RaggedBatch) -> Output:
        logits = super().forward(batch).logits.clone()
        for row, position in zip(logits, batch.positions[batch.logit_rows].tolist(), strict=True):
            if position == AT:
                self._fault(row)
        return Output(logits)


def _nothing(row: Tensor) -> None:
    pass


def _all_nan(row: Tensor) -> None:
    row.fill_(torch.nan)


def _one_nan(row: Tensor) -> None:
    row[7] = torch.nan


def _infinite(row: Tensor) -> None:
    row[7] = torch.inf


def _all_forbidden(row: Tensor) -> None:
    row.fill_(-torch.inf)


FAULTS = {
    "all NaN": _all_nan,
    "one NaN": _one_nan,
    "infinite": _infinite,
    "all forbidden": _all_forbidden,
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "filters": {"top_k": 5, "top_p": 0.9, "min_p": 0.1},
    "adjusted": {"frequency_penalty": 0.5, "logit_bias": ((7, -100.0),), "num_logprobs": 2},
}


def _run(
    sampling: dict[str, Any], fault: Callable[[Tensor], None], drafts: list[int]
) -> dict[int, list[Verdict]]:
    """A victim of 40 tokens, and two mates that never come near its faulty position."""
    engine = TargetEngine(Faulty(fault), BlockManager(64, 16))
    params = SamplingParams(**{"max_tokens": 12, "seed": 4, "ignore_eos": True, **sampling})
    for sid, prompt in ((1, LONG), (2, LONG[:5]), (3, LONG[5:9])):
        engine.submit(OpenSequence(sid, prompt, len(prompt), params, 8))
    if drafts:
        engine.submit(piece(1, len(LONG), *drafts))
    found: dict[int, list[Verdict]] = {1: [], 2: [], 3: []}
    while engine.has_work():
        for v in engine.step().verdicts:
            found[v.sequence_id].append(v)
    return found


def _text(verdicts: list[Verdict]) -> list[int]:
    return [t for v in verdicts for t in v.token_ids]


@pytest.mark.parametrize("num_drafts", [0, 3, 8])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_row_without_numbers_ends_its_request_only(
    fault: str, sampling: str, num_drafts: int
) -> None:
    """In a drafted row too: the tokens before it are delivered, its drafts accounted for."""
    whole = _run(SAMPLING[sampling], _nothing, [])
    text = _text(whole[1])
    found = _run(SAMPLING[sampling], FAULTS[fault], text[:num_drafts])
    assert [_text(found[sid]) for sid in (2, 3)] == [_text(whole[sid]) for sid in (2, 3)]
    assert _text(found[1]) == text[: AT + 1 - len(LONG)]
    *fine, last = found[1]
    assert last.error is not None
    assert last.error.code == INTERNAL
    assert last.committed_len == AT + 1
    assert all(v.error is None for v in fine)
    tested = sum(v.num_tested for v in found[1])
    assert tested == min(num_drafts, AT + 1 - len(LONG))
    assert tested + sum(v.num_stale for v in found[1]) == num_drafts
    assert all(v.num_stale == sum(v.stale) for v in found[1])


def test_drafts_in_the_failed_pass_and_behind_it_are_stale() -> None:
    """Those in the pass, one that came while it ran, and a chain that was replaced meanwhile."""
    for late in (piece(1, 6, 7), piece(1, 3, 9, serial=1)):
        house = House(without_numbers=(3,))
        house.submit(open_sequence(1, lookahead=2), piece(1, 3, 4, 5, 6))
        house.model.during = partial(house.submit, late)
        house.step()
        v = house.last[1]
        assert v.error is not None
        assert (v.num_tested, v.num_stale) == (0, 4)
        house.model.during = lambda: None
        house.finish()


@pytest.mark.parametrize(
    "changes",
    [
        {"min_tokens": 2, "stop_token_ids": (4, 6)},
        {"repetition_penalty": 1e-320},
        {"temperature": 1e-5, "logit_bias": ((3, 100.0),), "repetition_penalty": 1e-305},
    ],
    ids=["all that is possible is forbidden", "overflow", "overflow by temperature"],
)
def test_a_sampler_that_leaves_nothing_ends_its_request_only(changes: dict[str, Any]) -> None:
    """After 3 just the two ends are possible; they may come where nothing forbids them."""
    table = torch.full((1, 8, 8), -torch.inf, dtype=torch.float64)
    table[0, :, 4], table[0, :, 6], table[0, 1, 3], table[0, 2, 3] = 1.0, 0.5, 3.0, 3.0
    engine = TargetEngine(TableModel(table), BlockManager(16, 4), eos_token_ids=(4,))
    for sid, extra in ((1, {}), (2, changes), (3, {})):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 5, **extra})
        engine.submit(OpenSequence(sid, (4, 6, 3), 3, params))
    first, failed, third = engine.step().verdicts
    assert first.token_ids == third.token_ids == (4,)
    assert failed.error is not None
    assert failed.error.code == INTERNAL
    assert not engine.has_work()
