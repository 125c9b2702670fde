"""Which draft tokens are kept, and what stands in place of the first that is not.

Pure: log p and the draft runs of one step in, decisions out. All three rules are exact: the
law of the tokens that come out is p's, whatever the drafts were.

- GREEDY and COUPLED: the target decides its own token y and keeps the draft token iff it is
  y. Under COUPLED y is argmax(log p + G) with noise G that the draft shares (Gumbel coupling;
  Daliri, Musco, Suresh: Coupling without Communication and Drafter-Invariant Speculative
  Decoding, 2025).
- REJECTION: keep x iff r * q(x) < p(x), else sample from norm(max(0, p - q)) (Leviathan,
  Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, ICML 2023,
  algorithm 1; Chen et al. 2023, theorem 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.engine.noise import Domain, Noise, NoiseKeys, UIntArray
from common.engine.sampling import index_on
from common.types import BoolArray, IntArray, Rule, SparseDist

NO_DRAFT = -1


@dataclass(frozen=True)
class DraftRuns:
    """R rows of S sequences: row i of a run holds p for the run's i-th draft token.

    The last row of a run comes after all tokens that the forward pass saw; its draft token,
    if any, is one that arrived while the pass was running.
    """

    row_start: IntArray  # [S + 1] first row of each sequence, every sequence has one or more
    rules: Sequence[Rule]  # [S]
    seeds: UIntArray  # [S] of the noise
    start: IntArray  # [S] absolute position that a sequence's first row decides
    draft: IntArray  # [R] token to test, NO_DRAFT where none is at hand (last rows only)
    dists: Mapping[int, SparseDist]  # row -> q, for REJECTION rows; absent means one-hot

    @cached_property
    def num_rows(self) -> IntArray:
        """Rows of each sequence. [S]"""
        return np.diff(self.row_start)

    @cached_property
    def keys(self) -> NoiseKeys:
        """Whose noise decides each row. [R]"""
        offset = np.repeat(self.start - self.row_start[:-1], self.num_rows)
        positions = np.arange(self.row_start[-1]) + offset
        return NoiseKeys(np.repeat(self.seeds, self.num_rows), positions)


@dataclass(frozen=True)
class Accepted:
    """Decisions: the first num_emitted of a sequence's rows each decide one token."""

    tokens: IntArray  # [R] meaningful for emitted rows only
    usable: BoolArray  # [R] no NaN or infinite logit made the token; for emitted rows only
    num_emitted: IntArray  # [S] 1 or more
    num_tested: IntArray  # [S]
    num_accepted: IntArray  # [S] the first of the emitted tokens


def accept(
    log_p: Tensor, runs: DraftRuns, noise: Noise, likeliest: Tensor | None = None
) -> Accepted:
    """Test every run against log p. [R, V]

    Greedy rows may hold any increasing function of p, coupled ones log p up to a constant.
    likeliest [R]: where each row was largest before the sampler, if that is known; it decides
    greedy rows, and is a place to begin for the others.
    """
    greedy, coupled, rejection = _rows_by_rule(runs)
    tokens, usable = _own(log_p, greedy, coupled, runs, noise, likeliest)
    kept = tokens == runs.draft  # NO_DRAFT is no token
    tested = rejection[runs.draft[rejection] != NO_DRAFT]
    if tested.size:
        kept[tested] = _passes(log_p, tested, runs, noise)
        tokens[tested] = runs.draft[tested]

    last = _deciding_rows(kept, runs.row_start)
    resampled = last[~kept[last] & np.isin(last, rejection)] if rejection.size else rejection
    if resampled.size:
        log_w = _log_residual(log_p, resampled, runs)
        drawn = noise.choose(runs.keys[resampled], Domain.RESIDUAL, log_w)
        tokens[resampled] = drawn.cpu().numpy()
    if rejection.size:
        usable[rejection] = _finite(log_p, rejection, tokens[rejection])

    num_emitted = last - runs.row_start[:-1] + 1
    return Accepted(
        tokens=tokens,
        usable=usable,
        num_emitted=num_emitted,
        num_tested=num_emitted - (runs.draft[last] == NO_DRAFT),
        num_accepted=num_emitted - 1 + kept[last],
    )


def _rows_by_rule(runs: DraftRuns) -> list[IntArray]:
    """Rows under GREEDY, COUPLED and REJECTION."""
    order, there = [Rule.GREEDY, Rule.COUPLED, Rule.REJECTION], set(runs.rules)
    if len(there) == 1:
        every = np.arange(len(runs.draft))
        return [every if rule in there else every[:0] for rule in order]
    rules = np.repeat([order.index(r) for r in runs.rules], runs.num_rows)
    return [np.flatnonzero(rules == i) for i in range(len(order))]


def _own(
    log_p: Tensor,
    greedy: IntArray,
    coupled: IntArray,
    runs: DraftRuns,
    noise: Noise,
    likeliest: Tensor | None,
) -> tuple[IntArray, BoolArray]:
    """The target's own token of greedy and coupled rows, and whether it is one. [R] each

    Stays on the device until both are known for all rows; one small copy brings them here.
    """
    num_rows = len(log_p)
    if greedy.size == num_rows:
        own = noise.likeliest(log_p) if likeliest is None else likeliest
    elif coupled.size == num_rows:
        own = noise.choose(runs.keys, Domain.TOKEN, log_p, likeliest)
    else:
        own = torch.zeros(num_rows, dtype=torch.int64, device=log_p.device)
        if greedy.size:
            index = index_on(greedy, own)
            own[index] = noise.likeliest(log_p[index]) if likeliest is None else likeliest[index]
        if coupled.size:
            index = index_on(coupled, own)
            top = None if likeliest is None else likeliest[index]
            own[index] = noise.choose(runs.keys[coupled], Domain.TOKEN, log_p[index], top)
    if log_p.device.type == "cpu":
        tokens = own.numpy()
        return tokens, _finite(log_p, np.arange(num_rows), tokens)
    finite = torch.isfinite(log_p.gather(1, own.unsqueeze(1)).squeeze(1))
    tokens, usable = torch.stack((own, finite.long())).cpu().numpy()
    return tokens, usable.astype(bool)


def _finite(log_p: Tensor, rows: IntArray, tokens: IntArray) -> BoolArray:
    """Whether log p of these rows' tokens is a number. [N], [N] -> [N]"""
    if log_p.device.type == "cpu":
        finite: BoolArray = np.isfinite(log_p.numpy()[rows, tokens])
    else:
        finite = torch.isfinite(log_p[index_on(rows, log_p), index_on(tokens, log_p)]).cpu().numpy()
    return finite


def _deciding_rows(kept: BoolArray, row_start: IntArray) -> IntArray:
    """The first row of each sequence whose token was not kept, else its last. [S]"""
    if not kept.any():
        return row_start[:-1]
    candidates = np.where(kept, len(kept), np.arange(len(kept)))
    return np.minimum(np.minimum.reduceat(candidates, row_start[:-1]), row_start[1:] - 1)


def _passes(log_p: Tensor, tested: IntArray, runs: DraftRuns, noise: Noise) -> BoolArray:
    """Whether each tested row's draft token is kept. [N] -> [N] bool"""
    x = runs.draft[tested]
    p = log_p[index_on(tested, log_p), index_on(x, log_p)].double().exp()
    q = np.ones(len(x))  # a guess without q is one-hot
    for i, row in enumerate(tested.tolist()):
        if (dist := runs.dists.get(row)) is not None:
            q[i] = dist.probs[dist.token_ids == x[i]].sum()
    passes: BoolArray = noise.keep(runs.keys[tested], p, torch.from_numpy(q).to(p)).cpu().numpy()
    return passes


def _log_residual(log_p: Tensor, rows: IntArray, runs: DraftRuns) -> Tensor:
    """Log of max(0, p - q), of p where nothing was tested; not normalised. [N] -> [N, V]"""
    p = log_p[index_on(rows, log_p)].double().exp()  # [N, V]
    residual = p.clone()
    for i, row in enumerate(rows.tolist()):
        if (dist := runs.dists.get(row)) is not None:
            residual[i, index_on(dist.token_ids, p)] -= torch.from_numpy(dist.probs).to(p)
        elif runs.draft[row] != NO_DRAFT:
            residual[i, int(runs.draft[row])] = 0.0
    residual = residual.clamp_(min=0.0)
    # p = q up to rounding leaves nothing, and then p is as right as anything.
    nothing_left = residual.sum(dim=-1, keepdim=True) <= 0.0
    return torch.where(nothing_left, p, residual).log()
