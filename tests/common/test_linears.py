"""Reordered linears: as near to float64 as bfloat16 allows, and the same bits for any rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from common.config import ModelConfig
from common.engine.linears import ReorderedLinear, reorder_linears
from common.engine.loader import build
from tests.models import transformer

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not reorder_linears(nn.Module()), reason="no oneDNN for bfloat16 here"
)


@pytest.mark.parametrize("inputs", [128, 576, 577, 768, 1536, 3072, 4100])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_the_same_bits_and_near_the_exact(inputs: int, biased: bool) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(576, inputs).to(BF16), torch.randn(200, inputs).to(BF16)
    bias = torch.randn(576).to(BF16) if biased else None
    linear = ReorderedLinear(weight, bias)
    whole = linear(x)
    exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
    error = (whole.double() - exact).square().mean().sqrt() / exact.std()
    assert error < 0.003  # bfloat16 itself rounds by 0.0017
    for size in (1, 2, 3, 7, 16, 33, 100):
        parts = [linear(part) for part in torch.split(x, size)]
        assert torch.equal(torch.cat(parts), whole)
    assert torch.equal(linear(x[None])[0], whole)


@pytest.mark.parametrize("inputs", [1, 8, 31, 32])
def test_small_ones_are_near_the_exact(inputs: int) -> None:
    weight, x = torch.randn(61, inputs).to(BF16), torch.randn(20, inputs).to(BF16)
    exact = (x.double() @ weight.double().T).to(BF16)
    torch.testing.assert_close(ReorderedLinear(weight, None)(x), exact, rtol=0.01, atol=1e-4)


def test_linears_of_both_kinds_are_replaced_and_nothing_else() -> None:
    conv, linear = Conv1D(24, 16).to(BF16), nn.Linear(16, 24).to(BF16)
    nn.init.normal_(conv.bias)
    model = nn.ModuleDict({"conv": conv, "linear": linear, "norm": nn.LayerNorm(16).to(BF16)})
    x = torch.randn(5, 16).to(BF16)
    expected = {name: model[name](x) for name in model}
    assert reorder_linears(model)
    kinds = {name: type(module) for name, module in model.items()}
    assert kinds == {"conv": ReorderedLinear, "linear": ReorderedLinear, "norm": nn.LayerNorm}
    for name, module in model.items():
        torch.testing.assert_close(module(x), expected[name], rtol=0.02, atol=0.02)


def test_the_loader_reorders_bfloat16_only() -> None:
    for dtype, asked, features in (
        (BF16, "torch", ("reordered-linears",)),
        (BF16, "reference", ()),
        (torch.float32, "torch", ()),
    ):
        config = ModelConfig(num_kv_tokens=512, backend=asked)
        assert build(transformer("gpt2", dtype), config)[0].features == features
