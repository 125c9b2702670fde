"""Log probabilities of decided tokens, by the model's own logits: before the sampler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.engine.sampling import widened
from common.types import FloatArray, TopLogprobs


class Logprobs(NamedTuple):
    """Of consecutive tokens of one sequence."""

    chosen: tuple[float, ...] = ()  # empty unless asked for
    top: tuple[TopLogprobs, ...] = ()  # empty unless some were asked for

    def first(self, num: int) -> Logprobs:
        """Those of the first num tokens."""
        return Logprobs(self.chosen[:num], self.top[:num])


def logprobs_of(logits: Tensor, tokens: list[int], num_top: int) -> Logprobs:
    """Log-softmax at each row's token, and at the num_top likeliest. [N, V], [N]"""
    log_p = torch.log_softmax(widened(logits), dim=-1)
    chosen = log_p[torch.arange(len(tokens)), torch.tensor(tokens, device=log_p.device)].tolist()
    if num_top == 0:
        return Logprobs(tuple(chosen))
    least = log_p.topk(min(num_top, log_p.shape[1]), dim=-1).values[:, -1].cpu().numpy()
    rows = zip(log_p.cpu().numpy(), least, strict=True)
    return Logprobs(tuple(chosen), tuple(_top(row, float(at), num_top) for row, at in rows))


def _top(row: FloatArray, least: float, num: int) -> TopLogprobs:
    """The likeliest first, of equals the lower id. [V]; no more than num are above least"""
    ids = np.flatnonzero(row >= least)  # more than num where some tie with the last
    ids = ids[np.argsort(-row[ids], kind="stable")][:num]
    return TopLogprobs(tuple(ids.tolist()), tuple(row[ids].tolist()))
