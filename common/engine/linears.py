"""bfloat16 linears whose weights oneDNN has reordered once, for the sake of row invariance.

Plain ones are not row-invariant. Reordered for single rows, oneDNN sums over K in one order for
every number of rows as long as K is short (measured to 576); longer ones are cut into pieces, whose
products are added in float32. A few small shapes are exceptions, so the loader's check says what
holds for a model. A step takes about as long as before (measured: a tenth less to a tenth more).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

PIECE, LONGEST = 512, 576
ROWS = 1  # that the order is made for; made for any number, it is not row-invariant


class ReorderedLinear(nn.Module):
    """x [.., K] times a weight [N, K], plus a bias [N] if there is one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        inputs = weight.shape[1]
        self._pieces = [inputs] if inputs <= LONGEST else [PIECE] * (inputs // PIECE)
        if rest := inputs - sum(self._pieces):
            self._pieces.append(rest)
        self._bias = bias
        self._weights = [
            torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), ROWS)
            for part in torch.split(weight, self._pieces, dim=1)
        ]

    def forward(self, x: Tensor) -> Tensor:
        """As `nn.Linear`."""
        if len(self._pieces) == 1:
            return _product(x, self._weights[0], self._bias)
        parts = zip(torch.split(x, self._pieces, dim=-1), self._weights, strict=True)
        total = sum(_product(part, weight, None).float() for part, weight in parts)
        assert isinstance(total, Tensor)
        return (total if self._bias is None else total + self._bias).to(x.dtype)


def reorder_linears(model: nn.Module) -> bool:
    """Put them in place of a bfloat16 model's linears on CPU; False: this machine has none."""
    try:
        ReorderedLinear(torch.zeros(32, 32, dtype=torch.bfloat16), None)(
            torch.zeros(1, 32, dtype=torch.bfloat16)
        )
    except (AttributeError, RuntimeError):  # no oneDNN in this torch, or no AVX512
        return False
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear | Conv1D) and child.weight.dtype == torch.bfloat16:
                weight = child.weight.T if isinstance(child, Conv1D) else child.weight
                bias = None if child.bias is None else child.bias.detach()
                setattr(module, name, ReorderedLinear(weight.detach(), bias))
    return True


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found
