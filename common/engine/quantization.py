"""Weights in 8 or 4 bits, in groups of 32 along the inputs.

A quantised model is the model whose weights are what the few bits stand for, rounded to bfloat16:
everything else (activations, KV cache, sums) is as ever. int8 keeps a scale a group; int4 a scale
and a minimum, like GGUF's Q4_1. Layers take the asked format; the output head takes int8 in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from common.errors import ConfigurationError

GROUP = 32


@dataclass(frozen=True)
class Quantized:
    """A weight [N, K] in few bits; q * scale + minimum is what it stands for."""

    kind: str
    q: Tensor  # [N, K], int8: -127..127, int4: 0..15 in uint8
    scale: Tensor  # [N, K / 32] float16
    minimum: Tensor | None  # the same; int8 has none

    def widen(self) -> Tensor:
        """What it stands for. [N, K] bfloat16"""
        # In float64, so that product and sum round once, as the kernel's fused ones do.
        w = _grouped(self.q.double()) * self.scale.double().unsqueeze(2)
        if self.minimum is not None:
            w += self.minimum.double().unsqueeze(2)
        rounded: Tensor = w.float().to(torch.bfloat16).flatten(1)
        return rounded


def quantize(weight: Tensor, kind: str) -> Quantized:
    """The nearest numbers of a format; K must be a multiple of 32."""
    groups = _grouped(weight.float())
    if kind == "int8":
        scale = (groups.abs().amax(2) / 127).half()
        q = groups / scale.float().clamp(min=1e-12).unsqueeze(2)
        return Quantized(kind, q.round().clamp(-127, 127).to(torch.int8).flatten(1), scale, None)
    minimum = groups.amin(2).half()
    scale = ((groups.amax(2) - minimum.float()) / 15).half()
    q = (groups - minimum.float().unsqueeze(2)) / scale.float().clamp(min=1e-12).unsqueeze(2)
    return Quantized(kind, q.round().clamp(0, 15).to(torch.uint8).flatten(1), scale, minimum)


def _grouped(weight: Tensor) -> Tensor:
    return weight.view(len(weight), -1, GROUP)


def quantize_model(model: Any, kind: str) -> None:
    """Give every linear of the model the weights that its few bits stand for, and keep the bits.

    They are found as `quantized` on the module. Raises `ConfigurationError` if a width does not
    fit. The embedding keeps its weights; an output head
    that shares them gets its own.
    """
    head = model.get_output_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if module.in_features % GROUP:
                raise ConfigurationError(
                    f"can't be {kind}: a weight has {module.in_features} inputs, no multiple of"
                    f" {GROUP}",
                    field="--quantization",
                )
            found = quantize(module.weight.detach(), "int8" if module is head else kind)
            module.weight = nn.Parameter(found.widen(), requires_grad=False)
            vars(module)["quantized"] = found
