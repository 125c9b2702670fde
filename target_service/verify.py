"""A step's forward pass and its decisions: rows in, verified runs out.

Joins scheduler and acceptance: `batch_of` packs what the scheduler planned, `decide` puts
all rows that decide tokens through the sampler and one call of `accept`.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.engine.batch import RaggedBatch, Span, pack
from common.engine.block_manager import BlockManager
from common.engine.noise import Noise, NoiseKeys
from common.engine.sampling import RowParams, log_probs, unusable_rows
from common.types import BoolArray
from target_service.acceptance import NO_DRAFT, DraftRuns, accept
from target_service.scheduler import Work
from target_service.sequence import Draft


@dataclass(frozen=True)
class Decision:
    """What a step found for one sequence, before a finish cuts it."""

    work: Work
    emitted: list[int]  # empty if the model yielded no numbers
    num_tested: int
    num_accepted: int


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


def decide(plan: Many[Work], logits: Tensor, noise: Noise) -> list[Decision]:
    """Test every run against its logits, and what has arrived since for the row after it.

    logits [R, V], rows of the deciding work in order. Prompt rows that decide nothing are
    marked as cached.
    """
    deciding = []
    for work in plan:
        if work.decides:
            deciding.append(work)
        else:
            work.seq.num_cached += work.num_rows
    if not deciding:
        return []
    runs = _draft_runs(deciding)
    params = [w.seq.params for w in deciding]
    log_p = log_probs(logits, RowParams.of(params, np.diff(runs.row_start)))
    accepted = accept(log_p, runs, noise)
    num_usable = _leading_usable(unusable_rows(logits), runs)
    decisions = []
    for i, work in enumerate(deciding):
        first = int(runs.row_start[i])
        num = min(int(accepted.num_emitted[i]), num_usable[i])
        emitted: list[int] = accepted.tokens[first : first + num].tolist()
        num_tested, num_accepted = int(accepted.num_tested[i]), int(accepted.num_accepted[i])
        decisions.append(Decision(work, emitted, min(num_tested, num), min(num_accepted, num)))
    return decisions


def _draft_runs(deciding: Many[Work]) -> DraftRuns:
    num_rows = np.array([1 + len(w.run) for w in deciding], np.int64)
    row_start = np.concatenate([[0], np.cumsum(num_rows)])
    drafts: list[Draft | None] = []
    for work in deciding:
        drafts += [*work.run, work.seq.late_draft(work.run)]
    first = np.array([len(w.seq.tokens) for w in deciding], np.int64)
    seeds = np.array([w.seq.params.seed for w in deciding], np.uint64)
    positions = np.arange(row_start[-1]) + np.repeat(first - row_start[:-1], num_rows)
    return DraftRuns(
        row_start=row_start,
        rules=[w.seq.params.rule for w in deciding],
        draft=np.array([d.token if d else NO_DRAFT for d in drafts], np.int64),
        keys=NoiseKeys(np.repeat(seeds, num_rows), positions),
        dists={i: d.dist for i, d in enumerate(drafts) if d and d.dist},
    )


def _leading_usable(unusable: BoolArray, runs: DraftRuns) -> list[int]:
    """Rows of each sequence before its first one without numbers. [S]"""
    bounds = zip(runs.row_start[:-1], runs.row_start[1:], strict=True)
    return [int(np.argmax(unusable[a:b])) if unusable[a:b].any() else int(b - a) for a, b in bounds]
