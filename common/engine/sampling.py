"""Logits to p: temperature, min_p, top_k, top_p, in this order.

The sampler's first part, what the text so far makes of the logits, is in `adjustments.py`.
Pure functions over rows; a row's result depends on nothing but its own logits and
parameters. Every filter keeps what ties with the least likely token that it keeps, so the
kept set never depends on an order among equals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from common.types import BoolArray, FloatArray, IntArray, Rule, SamplingParams, SparseDist

TOP_P_CANDIDATES = (64, 1024)
"""top_p looks at so many likeliest tokens, then at more, and sorts all where they fall short."""


@dataclass(frozen=True)
class RowParams:
    """The sampling parameters of R rows as arrays."""

    greedy: BoolArray  # [R]
    normal: BoolArray  # [R] whether p itself is needed, not only what is proportional to it
    temperature: FloatArray  # [R], 1 where greedy
    top_k: IntArray  # [R]
    top_p: FloatArray  # [R]
    min_p: FloatArray  # [R]

    @classmethod
    def of(cls, params: Sequence[SamplingParams], rows: IntArray) -> RowParams:
        """Parameters of sequences, each repeated for its number of rows. [S], [S] -> [R]"""
        greedy = np.array([p.rule is Rule.GREEDY for p in params], bool)
        warm = [1.0 if p.rule is Rule.GREEDY else p.temperature for p in params]
        normal = np.array([p.rule is Rule.REJECTION for p in params], bool)
        return cls(
            np.repeat(greedy, rows),
            np.repeat(normal, rows),
            np.repeat(np.array(warm, np.float64), rows),
            np.repeat(np.array([p.top_k for p in params], np.int64), rows),
            np.repeat(np.array([p.top_p for p in params], np.float64), rows),
            np.repeat(np.array([p.min_p for p in params], np.float64), rows),
        )


@torch.inference_mode()  # a model's logits may not be written to outside
def log_probs_(logits: Tensor, rows: RowParams) -> Tensor:
    """Log p of every row, -inf where a filter drops the token. [R, V] -> [R, V]

    In float32 at least; uses the logits up, for memory of their size costs more than what is done
    to them. Normalised in `normal` rows only; elsewhere up to a constant, which a draw by Gumbel
    noise does not see. Greedy rows come back as they are: only their argmax matters.
    """
    x = widened(logits)
    warm = np.flatnonzero(~rows.greedy)
    if warm.size == 0:
        return x
    every = warm.size == len(rows.greedy)
    y = x if every else x[index_on(warm, x)]
    if (rows.temperature[warm] != 1).any():
        y /= _column(rows.temperature[warm], y)
    for drop in (_drop_min_p, _drop_top_k, _drop_top_p):
        y = drop(y, rows, warm)
    normal = np.flatnonzero(rows.normal[warm])
    if normal.size == len(warm):
        y = torch.log_softmax(y, dim=-1)
    elif normal.size:
        index = index_on(normal, y)
        y[index] = torch.log_softmax(y[index], dim=-1)
    if every:
        return y
    x[index_on(warm, x)] = y
    return x


def widened(logits: Tensor) -> Tensor:
    """The same numbers in float32 at least; the same tensor if they are. [R, V]"""
    if logits.dtype in (torch.float32, torch.float64):
        return logits
    return logits.float()


def _column(values: FloatArray | IntArray, like: Tensor) -> Tensor:
    return torch.from_numpy(values).to(like).unsqueeze(1)


def index_on(values: IntArray, like: Tensor) -> Tensor:
    """Indices into a tensor, on its device."""
    return torch.from_numpy(values).to(like.device)


def _drop_below(y: Tensor, which: IntArray, floor: Tensor) -> Tensor:
    """Rows `which` of y with -inf below their floor. [R, V], [N], [N, 1] -> [R, V]"""
    index = index_on(which, y)
    kept = y[index]
    y[index] = kept.masked_fill(kept < floor, -torch.inf)
    return y


def _drop_min_p(y: Tensor, rows: RowParams, warm: IntArray) -> Tensor:
    min_p = rows.min_p[warm]
    which = np.flatnonzero(min_p > 0)
    if which.size == 0:
        return y
    highest = y[index_on(which, y)].amax(dim=-1, keepdim=True)  # [N, 1]
    return _drop_below(y, which, highest + _column(np.log(min_p[which]), y))


def _drop_top_k(y: Tensor, rows: RowParams, warm: IntArray) -> Tensor:
    top_k = rows.top_k[warm]
    which = np.flatnonzero((top_k > 0) & (top_k < y.shape[1]))
    if which.size == 0:
        return y
    k = index_on(top_k[which], y).unsqueeze(1)  # [N, 1]
    best = y[index_on(which, y)].topk(int(k.max()), dim=-1).values  # [N, K], descending
    return _drop_below(y, which, best.gather(1, k - 1))


def _drop_top_p(y: Tensor, rows: RowParams, warm: IntArray) -> Tensor:
    top_p = rows.top_p[warm]
    which = np.flatnonzero(top_p < 1)
    if which.size == 0:
        return y
    chosen = y[index_on(which, y)]
    log_p = torch.log_softmax(chosen, dim=-1)  # [N, V]
    floor = _top_p_floors(log_p, _column(top_p[which], y))
    # Back to y's own scale: comparing the same numbers keeps ties together.
    y[index_on(which, y)] = chosen.masked_fill(log_p < floor, -torch.inf)
    return y


def _top_p_floors(log_p: Tensor, wanted: Tensor) -> Tensor:
    """Least log p in the smallest set with the wanted mass. [N, V], [N, 1] -> [N, 1]"""
    floor = torch.full_like(wanted, torch.nan)
    for num in (*TOP_P_CANDIDATES, log_p.shape[1]):
        short = torch.isnan(floor).squeeze(1)
        if not short.any():
            return floor
        rows = log_p if short.all() else log_p[short]
        every = num >= log_p.shape[1]
        best = rows.sort(dim=-1, descending=True)[0] if every else rows.topk(num, dim=-1)[0]
        floor[short] = _top_p_floor(best, wanted[short])
    return floor.nan_to_num(nan=-torch.inf)  # rounding: all of them fall short of top_p


def _top_p_floor(best: Tensor, wanted: Tensor) -> Tensor:
    """Least log p in the smallest leading set with the wanted mass; NaN if best has less.

    best [N, K] descending, wanted [N, 1] -> [N, 1].
    """
    mass = best.exp().cumsum(dim=-1)
    num_short = (mass < wanted).sum(dim=-1, keepdim=True)  # the token after these completes it
    floor = best.gather(1, num_short.clamp(max=best.shape[1] - 1))
    return floor.masked_fill(num_short == best.shape[1], torch.nan)


def sparsify(log_p: Tensor, support: int) -> list[SparseDist]:
    """q of every row: its likeliest tokens, renormalised in float64. [N, V] -> N of [<= support]"""
    best = log_p.double().topk(min(support, log_p.shape[1]), dim=-1)
    probs = torch.softmax(best.values, dim=-1).cpu().numpy()
    dists = []
    for ids, p in zip(best.indices.cpu().numpy(), probs, strict=True):
        alive = p > 0
        dists.append(SparseDist(ids[alive], p[alive] / p[alive].sum()))
    return dists


def likeliest(x: Tensor) -> Tensor:
    """Index of the largest number of each row, the lowest of equals. [N, V] -> [N]"""
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(x.numpy().argmax(axis=-1))  # nine times as fast as torch's
    return x.argmax(dim=-1)


def unusable_rows(logits: Tensor) -> BoolArray:
    """Rows whose largest logit is NaN or infinite. [R, V] -> [R]"""
    bad: BoolArray = (~torch.isfinite(logits.amax(dim=-1))).cpu().numpy()
    return bad
