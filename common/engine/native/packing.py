"""Weights in the order in which the kernels read them; see `kernels.cpp`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from common.engine.quantization import Quantized

TILE, DEPTH = 16, 32  # as in kernels.cpp
FORMATS = ("bfloat16", "int8", "int4")  # the same


def format_of(weight: Tensor | Quantized) -> str:
    """Name of the format that a weight is packed in."""
    return weight.kind if isinstance(weight, Quantized) else "bfloat16"


def weight_of(*modules: Any) -> Tensor | Quantized:
    """The weights of linears with equal inputs, as one [N, K]; quantised if they are."""
    found: list[Quantized] = [m.quantized for m in modules if hasattr(m, "quantized")]
    if not found:
        return torch.cat([m.weight for m in modules])
    minima = [x.minimum for x in found if x.minimum is not None]
    return Quantized(
        kind=found[0].kind,
        q=torch.cat([x.q for x in found]),
        scale=torch.cat([x.scale for x in found]),
        minimum=torch.cat(minima) if minima else None,
    )


def pack(weight: Tensor | Quantized) -> Tensor:
    """A weight [N, K] as tiles of 16 n by 32 k; N is padded with zeros, K must fit.

    Returns [N/16, K/32, bytes of a tile]: for quantised weights the scales of 16 n, their minima if
    there are some, and the numbers.
    """
    if not isinstance(weight, Quantized):
        return _tiles(weight.to(torch.bfloat16)).view(torch.uint8)
    numbers = [x for x in (weight.scale, weight.minimum) if x is not None]
    heads = [_pad(x).view(-1, TILE, x.shape[1]).transpose(1, 2).contiguous() for x in numbers]
    q = _tiles(weight.q).view(torch.uint8)
    if weight.kind == "int4":  # n of 0 to 7 in the low four bits, n of 8 to 15 in the high
        low, high = q.view(*q.shape[:2], -1, 2, TILE).unbind(3)
        q = (low | high << 4).flatten(2)
    return torch.cat([*(x.view(torch.uint8) for x in heads), q], dim=2)


def _pad(x: Tensor) -> Tensor:
    padded = x.new_zeros(-(-len(x) // TILE) * TILE, x.shape[1])
    padded[: len(x)] = x
    return padded


def _tiles(x: Tensor) -> Tensor:
    """[N/16, K/32, 512]: in a tile by pair of k, by n, and by k in its pair."""
    pairs = _pad(x).view(-1, TILE, x.shape[1] // DEPTH, DEPTH // 2, 2)
    return pairs.permute(0, 2, 3, 1, 4).flatten(2).contiguous()
