"""A step's forward pass and its decisions: rows in, verified runs out.

Joins scheduler and acceptance: `batch_of` packs what the scheduler planned, `decide` puts
all rows that decide tokens through the sampler and one call of `accept`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np
import torch
from torch import Tensor

from common.engine.adjustments import RowEdit, adjust_
from common.engine.batch import Output, RaggedBatch, Span, pack
from common.engine.block_manager import BlockManager
from common.engine.noise import Noise
from common.engine.sampling import RowParams, log_probs_, widened
from common.types import BoolArray, IntArray, Rule
from target_service.acceptance import NO_DRAFT, DraftRuns, accept
from target_service.logprobs import Logprobs, logprobs_of
from target_service.scheduler import Work
from target_service.sequence import Draft


@dataclass(frozen=True)
class Decision:
    """What a step found for one sequence, before a finish cuts it."""

    work: Work
    emitted: list[int]  # empty if the model yielded no numbers
    tested: list[Draft]  # in order
    num_accepted: int
    logprobs: Logprobs  # of emitted, if asked for


def batch_of(plan: Many[Work], blocks: BlockManager, device: torch.device) -> RaggedBatch:
    """The planned rows; those at and after the last committed token need logits."""
    return pack(
        [
            Span(w.seq.sid, w.seq.num_cached, w.rows, 1 + len(w.run) if w.decides else 0)
            for w in plan
        ],
        blocks,
        device,
    )


def decide(plan: Many[Work], output: Output, noise: Noise) -> list[Decision]:
    """Test every run against its logits, and what has arrived since for the row after it.

    output: rows of the deciding work in order; used up: adjusted in place.
    """
    deciding = [w for w in plan if w.decides]
    if not deciding:
        return []
    drafts = [[*w.run, w.seq.late_draft(w.run)] for w in deciding]
    runs = _draft_runs(deciding, list(chain.from_iterable(drafts)))
    x = widened(output.logits)
    raw = {i: x[_rows(runs, i)].clone() for i, w in enumerate(deciding) if w.seq.wants_logprobs}
    likeliest = _edited_likeliest_(x, output.likeliest, _edits(deciding, runs), noise)
    params = [w.seq.params for w in deciding]
    if any(rule is not Rule.GREEDY for rule in runs.rules):
        x = log_probs_(x, RowParams.of(params, runs.num_rows))
    accepted = accept(x, runs, noise, likeliest)
    nums = np.stack([accepted.num_emitted, accepted.num_tested, accepted.num_accepted])
    if not accepted.usable.all():
        nums = np.minimum(nums, _leading_usable(~accepted.usable, runs))
    firsts, tokens = runs.row_start.tolist(), accepted.tokens.tolist()
    decisions = []
    for i, (work, num, num_tested, num_accepted) in enumerate(
        zip(deciding, *nums.tolist(), strict=True)
    ):
        emitted: list[int] = tokens[firsts[i] : firsts[i] + num]
        tested = [d for d in drafts[i][:num_tested] if d]
        logprobs = Logprobs()
        if i in raw and emitted:
            logprobs = logprobs_of(raw[i][:num], emitted, params[i].num_logprobs or 0)
        decisions.append(Decision(work, emitted, tested, num_accepted, logprobs))
    return decisions


def _edited_likeliest_(
    x: Tensor, likeliest: Tensor | None, edits: dict[int, RowEdit], noise: Noise
) -> Tensor | None:
    """Edits rows of x; returns `likeliest` brought up to date, None if it was not known."""
    adjust_(x, edits)
    if likeliest is not None and edits:
        edited = torch.tensor(list(edits), device=x.device)
        likeliest[edited] = noise.likeliest(x[edited])
    return likeliest


def _rows(runs: DraftRuns, i: int) -> slice:
    """The rows of the i-th sequence."""
    return slice(int(runs.row_start[i]), int(runs.row_start[i + 1]))


def _edits(deciding: Many[Work], runs: DraftRuns) -> dict[int, RowEdit]:
    """What the text before each row, draft tokens included, makes of its logits."""
    edits: dict[int, RowEdit] = {}
    for first, work in zip(runs.row_start.tolist(), deciding, strict=False):
        if (adjustments := work.seq.adjustments) is not None:
            along = adjustments.edits_along([d.token for d in work.run])
            edits |= {first + i: edit for i, edit in enumerate(along) if edit is not None}
    return edits


def _draft_runs(deciding: Many[Work], drafts: list[Draft | None]) -> DraftRuns:
    """What is tested in each row; drafts [R], None where there is none."""
    return DraftRuns(
        row_start=np.array([0, *accumulate(1 + len(w.run) for w in deciding)], np.int64),
        rules=[w.seq.params.rule for w in deciding],
        seeds=np.array([w.seq.params.seed for w in deciding], np.uint64),
        start=np.array([len(w.seq.tokens) for w in deciding], np.int64),
        draft=np.array([d.token if d else NO_DRAFT for d in drafts], np.int64),
        dists={i: d.dist for i, d in enumerate(drafts) if d and d.dist},
    )


def _leading_usable(unusable: BoolArray, runs: DraftRuns) -> IntArray:
    """Rows of each sequence before its first one without numbers. [S]"""
    bounds = zip(runs.row_start[:-1], runs.num_rows, strict=True)
    found = [
        int(np.argmax(unusable[a : a + n])) if unusable[a : a + n].any() else n for a, n in bounds
    ]
    return np.array(found, np.int64)
