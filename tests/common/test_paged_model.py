"""A model over the paged cache says what it says about the whole text at once.

The oracle is the same transformers model with its own attention, on one dense text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config

from common.config import ModelConfig
from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.loader import build
from common.engine.native.build import attention_library
from common.engine.paged_model import PagedModel
from tests.models import CONFIGS, GEMMA2, VOCAB, transformer

FAMILIES = [*CONFIGS, "gemma2"]
DTYPES = {"reference": torch.float64, "cpu": torch.float32}
# Eager attention, which alone knows softcap, takes its softmax in float32.
BOUND = dict.fromkeys(CONFIGS, 1e-12) | {"gemma2": 1e-5}
BOUND_FLOAT32 = 1e-4
NO_KERNEL = attention_library(ModelConfig().cache_dir)[1]
each_backend = pytest.mark.parametrize(
    "backend",
    ["reference", pytest.param("cpu", marks=pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL))],
)
BLOCK, NUM_BLOCKS = 4, 64


@cache
def _paged(family: str, backend: str) -> PagedModel:
    config = ModelConfig(num_kv_tokens=NUM_BLOCKS * BLOCK, block_size=BLOCK, backend="torch")
    model = build(transformer(family).to(DTYPES[backend]), config)[0]
    assert isinstance(model, PagedModel)
    assert model.backend == backend
    return model


@cache
def _dense(family: str) -> Callable[[tuple[int, ...]], Tensor]:
    model = transformer(family)

    @cache
    def logits(tokens: tuple[int, ...]) -> Tensor:
        found: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return found

    return logits


def _text(sid: int, length: int = 30) -> tuple[int, ...]:
    return tuple(np.random.default_rng(sid).integers(0, VOCAB, length).tolist())


class Runner:
    """Sequences over one model; every logit that comes out is compared."""

    def __init__(self, family: str, backend: str) -> None:
        self._family, self._bound = family, BOUND[family]
        if backend == "cpu":
            self._bound = BOUND_FLOAT32
        self._model = _paged(family, backend)
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK)
        self.cached: dict[int, tuple[int, ...]] = {}

    def open(self, *sids: int) -> None:
        for sid in sids:
            self.blocks.open(sid)
            self.cached[sid] = ()

    def feed(self, **rows: tuple[tuple[int, ...], int]) -> None:
        """One pass: for each sequence its next tokens and how many last rows need logits."""
        spans, expected = [], []
        for name, (tokens, num_logits) in rows.items():
            sid = int(name[1:])
            start = len(self.cached[sid])
            assert self.blocks.reserve(sid, start + len(tokens))
            spans.append(Span(sid, start, tokens, num_logits))
            self.cached[sid] += tokens
            dense = _dense(self._family)(self.cached[sid])
            expected.append(dense[len(dense) - num_logits :])
        found = self._model.forward(pack(spans, self.blocks, "cpu")).logits
        want = torch.cat(expected)
        assert found.shape == want.shape
        torch.testing.assert_close(found.double(), want, rtol=0.0, atol=self._bound)

    def rollback(self, sid: int, length: int) -> None:
        self.blocks.truncate(sid, length)
        self.cached[sid] = self.cached[sid][:length]


@each_backend
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_decode_and_verification_in_one_batch(family: str, backend: str) -> None:
    a, b, c = _text(1), _text(2), _text(3)
    runner = Runner(family, backend)
    runner.open(1, 2, 3)
    runner.feed(s1=(a[:10], 1), s2=(b[:3], 0))  # a whole prompt, a chunk
    runner.feed(s2=(b[3:9], 1), s1=(a[10:11], 1), s3=(c[:5], 5))
    wrong = (*a[11:13], (a[13] + 1) % VOCAB, 5, 5)
    runner.feed(s3=(c[5:6], 1), s1=(wrong, 5), s2=(b[9:10], 1))  # a run that goes wrong
    runner.rollback(1, 13)
    runner.feed(s1=(a[13:16], 3), s2=(b[10:14], 4), s3=(c[6:20], 1))
    runner.blocks.check_integrity()


@each_backend
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", range(3))
def test_any_ragged_mixture(family: str, seed: int, backend: str) -> None:
    """Random chunks of random texts, with random rollbacks, while sequences come and go."""
    rng = np.random.default_rng(seed)
    runner = Runner(family, backend)
    opened = 0
    for _ in range(15):
        while len(runner.cached) < 4:
            opened += 1
            runner.open(opened)
        rows = {}
        for sid in rng.permutation(list(runner.cached))[: rng.integers(1, 5)].tolist():
            tokens = _text(sid)[len(runner.cached[sid]) :][: rng.choice([1, 1, 2, 5, 9])]
            if tokens:
                rows[f"s{sid}"] = (tokens, int(rng.integers(0, len(tokens) + 1)))
        if not any(num for _, num in rows.values()):
            continue
        runner.feed(**rows)
        for sid, tokens in list(runner.cached.items()):
            if len(tokens) >= 25:
                runner.blocks.free(sid)
                del runner.cached[sid]
            elif tokens and rng.random() < 0.3:
                runner.rollback(sid, int(rng.integers(0, len(tokens))))
        runner.blocks.check_integrity()
    assert opened > 4


@pytest.mark.parametrize("change", [{"sliding_window": 256}, {"attn_logit_softcapping": 50.0}])
def test_the_gemma_like_model_depends_on_window_and_softcap(change: dict[str, Any]) -> None:
    """Else the tests above would not see them."""
    torch.manual_seed(7)
    other = AutoModelForCausalLM.from_config(
        Gemma2Config(**(GEMMA2.to_dict() | change)),
        dtype=torch.float64,
        attn_implementation="eager",
    ).eval()
    found = other(input_ids=torch.tensor([_text(1)]), use_cache=False).logits[0]
    assert (found - _dense("gemma2")(_text(1))).abs().max() > 1e-2
