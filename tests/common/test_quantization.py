"""Weights in few bits: what they stand for, and that the native step computes with just that."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import ModelConfig
from common.engine.block_manager import BlockManager
from common.engine.loader import build
from common.engine.quantization import GROUP, quantize, quantize_model
from common.errors import ConfigurationError
from tests.common.test_native import CONFIGS, NUM_BLOCKS, NUM_TOKENS, _logits, _model, _native

STEPS = {"int8": 254, "int4": 15}


@settings(max_examples=40)
@given(st.integers(0, 2**31), st.sampled_from(sorted(STEPS)), st.floats(0.001, 100))
def test_off_by_half_a_step_of_the_group_at_most(seed: int, kind: str, size: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = size * torch.randn(48, 3 * GROUP, generator=generator)
    groups = weight.view(48, 3, GROUP)
    width = 2 * groups.abs().amax(2) if kind == "int8" else groups.amax(2) - groups.amin(2)
    error = (quantize(weight, kind).widen().float() - weight).view(48, 3, GROUP).abs()
    # Half a step, and the rounding of scale, minimum (float16) and result (bfloat16).
    bound = width / STEPS[kind] * 0.505 + groups.abs().amax(2) / 180
    assert bool((error.amax(2) <= bound).all())


def test_what_has_few_values_is_kept_to_the_bit() -> None:
    levels = torch.randint(0, 16, (32, 4 * GROUP), generator=torch.Generator().manual_seed(1))
    levels[:, ::GROUP], levels[:, 1::GROUP] = 0, 15
    weight = (levels * 0.03125 - 0.25).to(torch.bfloat16)
    assert torch.equal(quantize(weight, "int4").widen(), weight)
    assert torch.equal(quantize(torch.zeros(2, GROUP), "int8").widen().float(), torch.zeros(2, 32))


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("family", CONFIGS)
def test_computes_with_what_the_bits_stand_for(family: str, kind: str, amx: bool) -> None:
    """The same bits as the native step over the widened weights in bfloat16."""
    model: Any = _model(family, torch.bfloat16)
    quantize_model(model, kind)
    wide = copy.deepcopy(model)
    for module in wide.modules():
        vars(module).pop("quantized", None)
    few = _native(family, 2, amx, model=model)
    assert kind in few.features
    expected = _logits(
        _native(family, 1, amx, model=wide), [NUM_TOKENS], BlockManager(NUM_BLOCKS, 16)
    )
    pieces = [1, 70, 3, 33, NUM_TOKENS - 107]
    assert torch.equal(_logits(few, pieces, BlockManager(NUM_BLOCKS, 16)), expected)


def test_needs_the_native_step() -> None:
    model = _model("llama", torch.bfloat16)
    with pytest.raises(ConfigurationError, match="native step") as caught:
        build(model, ModelConfig(backend="torch", quantization="int4", num_kv_tokens=512))
    assert caught.value.field == "--quantization"


def test_widths_that_do_not_fit_are_refused() -> None:
    model: Any = torch.nn.Sequential(torch.nn.Linear(40, 8))
    model.get_output_embeddings = lambda: None
    with pytest.raises(ConfigurationError, match="40 inputs"):
        quantize_model(model, "int8")
