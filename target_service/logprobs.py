"""Log probabilities of decided tokens, by the model's own logits: before the sampler."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.engine.sampling import widened
from common.types import FloatArray, IntArray, TopLogprobs


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
    index = torch.tensor(tokens, device=log_p.device).unsqueeze(1)
    chosen = log_p.gather(1, index).squeeze(1)
    if num_top == 0:
        return Logprobs(tuple(chosen.tolist()))
    num = min(num_top, log_p.shape[1])
    least = log_p.topk(num, dim=-1).values[:, -1:]
    # What ties with the last comes along; a few numbers leave the device, never a whole row.
    rows, ids = (log_p >= least).nonzero(as_tuple=True)
    values, found = log_p[rows, ids].cpu().numpy(), ids.cpu().numpy()
    starts = np.searchsorted(rows.cpu().numpy(), np.arange(len(tokens) + 1))
    top = tuple(_top(found[a:b], values[a:b], num) for a, b in pairwise(starts))
    return Logprobs(tuple(chosen.tolist()), top)


def _top(ids: IntArray, log_p: FloatArray, num: int) -> TopLogprobs:
    """The likeliest first, of equals the lower id. ids ascend"""
    order = np.argsort(-log_p, kind="stable")[:num]
    return TopLogprobs(tuple(ids[order].tolist()), tuple(log_p[order].tolist()))
