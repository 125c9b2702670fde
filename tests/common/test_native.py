"""The native step against transformers, and row invariance to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from common.config import ModelConfig
from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.loader import build
from common.engine.native import NativeModel, UnsupportedError
from common.engine.native.build import library
from common.engine.native.noise import NativeNoise
from common.engine.noise import Domain, GumbelNoise, NoiseKeys
from common.engine.probe import is_row_invariant
from tests.models import transformer

CACHE = ModelConfig().cache_dir
NUM_BLOCKS, NUM_TOKENS, VOCAB = 96, 700, 61
pytestmark = pytest.mark.skipif(
    library(CACHE)[0] is None, reason=f"no native step here: {library(CACHE)[1]}"
)

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**_SHAPE, head_dim=32),
    "padded heads": lambda: LlamaConfig(**_SHAPE, head_dim=48),
    "own head": lambda: LlamaConfig(**_SHAPE, head_dim=64, tie_word_embeddings=True),
    "window": lambda: MistralConfig(**_SHAPE, head_dim=32, sliding_window=300),
    "biases": lambda: Qwen2Config(
        **(_SHAPE | {"num_attention_heads": 3, "num_key_value_heads": 1})
    ),
    "head norms": lambda: Qwen3Config(**_SHAPE, head_dim=32),
}


def _model(kind: str, dtype: torch.dtype) -> Any:
    """Weights that bfloat16 holds exactly, in either dtype."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), attn_implementation="sdpa")
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=0.3)
    return model.to(torch.bfloat16).to(dtype).eval().requires_grad_(False)


def _native(kind: str, threads: int = 1, amx: bool = True, model: Any = None) -> NativeModel:
    model = model or _model(kind, torch.bfloat16)
    return NativeModel(
        model,
        windows=[300 if kind == "window" else 0] * len(model.model.layers),
        num_blocks=NUM_BLOCKS,
        block_size=16,
        num_threads=threads,
        cache_dir=CACHE,
        amx=amx,
    )


def _text(sid: int, num: int = NUM_TOKENS) -> list[int]:
    return [(i * i + 7 * sid + i) % VOCAB for i in range(num)]


def _logits(
    model: NativeModel, pieces: list[int], blocks: BlockManager, sid: int = 0
) -> torch.Tensor:
    """Logits of a text put in piece by piece. [sum(pieces), V]"""
    ids, start, rows = _text(sid), 0, []
    blocks.open(sid)
    for num in pieces:
        assert blocks.reserve(sid, start + num)
        span = Span(sid, start, ids[start : start + num], num)
        rows.append(model.forward(pack([span], blocks, "cpu")).logits)
        start += num
    return torch.cat(rows)


@pytest.mark.parametrize("kind", CONFIGS)
def test_nearer_to_float32_than_torch_in_bfloat16(kind: str) -> None:
    ids = torch.tensor([_text(0)])
    with torch.inference_mode():
        exact = _model(kind, torch.float32)(input_ids=ids, use_cache=False).logits[0]
        torchs = _model(kind, torch.bfloat16)(input_ids=ids, use_cache=False).logits[0].float()
    ours = _logits(_native(kind), [NUM_TOKENS], BlockManager(NUM_BLOCKS, 16))

    def error(logits: torch.Tensor) -> float:
        return float((logits - exact).square().mean().sqrt() / exact.std())

    assert error(ours) < max(error(torchs), 0.01)


@pytest.mark.parametrize("amx", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_are_the_same_bits_in_any_batch(kind: str, amx: bool) -> None:
    """However a text is cut into passes, with one thread or two."""
    one, two = _native(kind, 1, amx), _native(kind, 2, amx)
    assert one.uses_amx <= amx
    whole = _logits(one, [NUM_TOKENS], BlockManager(NUM_BLOCKS, 16))

    @settings(max_examples=6)
    @given(st.lists(st.sampled_from([1, 2, 3, 8, 15, 16, 17, 33, 200]), min_size=4, max_size=40))
    def check(pieces: list[int]) -> None:
        pieces = pieces[: next((i for i in range(41) if sum(pieces[: i + 1]) > NUM_TOKENS), 41)]
        expected = whole[: sum(pieces)]
        for model in (one, two):
            assert torch.equal(_logits(model, pieces, BlockManager(NUM_BLOCKS, 16)), expected)

    check()


def test_batch_mates_change_nothing() -> None:
    """A ragged batch of prompts, runs and single rows, over shuffled blocks."""
    model, blocks = _native("llama", 2), BlockManager(NUM_BLOCKS, 16)
    lengths = [5, 130, 31, 64, 300]
    alone = [_logits(model, [n], BlockManager(NUM_BLOCKS, 16), s) for s, n in enumerate(lengths)]
    for sid in range(5):
        blocks.open(sid)
    done = [0] * 5
    for widths in ([3, 100, 16, 1, 200], [1, 17, 1, 60, 99], [1, 13, 14, 3, 1]):
        spans = []
        for sid, num in enumerate(widths):
            assert blocks.reserve(sid, done[sid] + num)
            ids = _text(sid)[done[sid] : done[sid] + num]
            spans.append(Span(sid, done[sid], ids, num))
        together = torch.split(model.forward(pack(spans, blocks, "cpu")).logits, widths)
        for sid, rows in enumerate(together):
            assert torch.equal(rows, alone[sid][done[sid] : done[sid] + widths[sid]])
            done[sid] += widths[sid]
    assert done == lengths


def test_a_rejected_run_leaves_no_trace() -> None:
    model, blocks = _native("llama"), BlockManager(NUM_BLOCKS, 16)
    expected = _logits(model, [40], BlockManager(NUM_BLOCKS, 16))
    _logits(model, [20], blocks)
    blocks.reserve(0, 28)
    model.forward(pack([Span(0, 20, [3] * 8, 1)], blocks, "cpu"))
    blocks.truncate(0, 20)
    blocks.reserve(0, 40)
    rows = model.forward(pack([Span(0, 20, _text(0)[20:40], 20)], blocks, "cpu")).logits
    assert torch.equal(rows, expected[20:])


@pytest.mark.parametrize("kind", ["llama", "padded heads", "head norms"])
def test_a_fork_over_copied_blocks_goes_on_to_the_bit(kind: str) -> None:
    """Parent and child write different tokens into what was one block."""
    model, blocks = _native(kind), BlockManager(NUM_BLOCKS, 16)
    expected = _logits(model, [60], BlockManager(NUM_BLOCKS, 16))
    _logits(model, [40], blocks)
    blocks.fork(0, 1, 39)
    blocks.reserve(0, 44)
    blocks.reserve(1, 60)
    copies = blocks.take_copies()
    assert len(copies) == 1
    model.copy_blocks(copies)
    blocks.check_integrity()
    spans = [Span(0, 40, [3] * 4, 4), Span(1, 39, _text(0)[39:60], 21)]
    rows = model.forward(pack(spans, blocks, "cpu")).logits
    assert torch.equal(rows[4:], expected[39:])
    blocks.reserve(0, 46)
    again = model.forward(pack([Span(0, 44, [3, 3], 2)], blocks, "cpu")).logits
    alone = BlockManager(NUM_BLOCKS, 16)
    alone.open(0)
    alone.reserve(0, 46)
    whole = model.forward(pack([Span(0, 0, _text(0)[:40] + [3] * 6, 6)], alone, "cpu")).logits
    assert torch.equal(torch.cat([rows[:4], again]), whole)


def test_numbers_gone_wrong_stay_in_their_sequence() -> None:
    """A sequence of NaN fills the cache; whoever gets its blocks next never sees them."""
    broken = _model("llama", torch.bfloat16)
    broken.get_input_embeddings().weight.data[9] = torch.nan
    model = _native("llama", model=broken)
    clean, blocks = _native("llama"), BlockManager(NUM_BLOCKS, 16)
    for sid in (7, 8):  # the whole cache
        blocks.open(sid)
        blocks.reserve(sid, NUM_BLOCKS * 8)
        for start in range(0, NUM_BLOCKS * 8, 256):
            rows = model.forward(pack([Span(sid, start, [9] * 256, 1)], blocks, "cpu")).logits
            assert rows.isnan().all()
    assert blocks.num_free == 0
    blocks.free(7)
    blocks.free(8)
    ids = [t if t != 9 else 10 for t in _text(1, 100)]
    blocks.open(1)
    blocks.reserve(1, 100)
    got = model.forward(pack([Span(1, 0, ids, 100)], blocks, "cpu")).logits
    other = BlockManager(NUM_BLOCKS, 16)
    other.open(1)
    other.reserve(1, 100)
    expected = clean.forward(pack([Span(1, 0, ids, 100)], other, "cpu")).logits
    assert torch.isfinite(got[:, :9]).all()
    assert torch.equal(got[:, :9], expected[:, :9])


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**64 - 1),
    num=st.sampled_from([1, 3, 16, 17, 61, 5000]),
    spread=st.sampled_from([0.0, 1.0, 5.0, 50.0, 1e6]),
    dropped=st.sampled_from([0.0, 0.5, 0.99]),
)
def test_the_same_choices_as_with_all_logarithms(
    seed: int, num: int, spread: float, dropped: float
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**63)
    log_w = torch.randn(8, num, generator=generator) * spread
    drop = torch.rand(8, num, generator=generator) < dropped
    drop[:, 0] = False
    log_w = log_w.masked_fill(drop, -torch.inf).log_softmax(dim=-1)
    keys = NoiseKeys(np.full(8, seed, np.uint64), np.arange(8))
    loaded, _ = library(CACHE)
    assert loaded
    native, plain = NativeNoise(loaded), GumbelNoise()
    expected = plain.choose(keys, Domain.TOKEN, log_w)
    assert torch.equal(native.choose(keys, Domain.TOKEN, log_w), expected)
    top = plain.likeliest(log_w)
    assert torch.equal(native.choose(keys, Domain.TOKEN, log_w, top), expected)
    anywhere = torch.from_numpy(np.arange(8) * 7919 % num)
    assert torch.equal(native.choose(keys, Domain.TOKEN, log_w, anywhere), expected)
    assert torch.equal(native.likeliest(log_w), top)
    if seed % 2:  # numbers that aren't any are found, as torch finds them
        log_w[3, seed % num] = torch.nan
        assert native.choose(keys, Domain.TOKEN, log_w)[3] == seed % num
        assert native.likeliest(log_w)[3] == seed % num


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("nan", [None, 0, 40])
def test_a_pass_finds_the_likeliest_on_its_way(threads: int, twins: bool, nan: int | None) -> None:
    """The first of equals, or the first that is no number, as who looks through the logits does."""
    model = _model("llama", torch.bfloat16)
    head = model.lm_head.weight
    if twins:  # every token has others that are as likely, in other blocks and lanes
        head[:] = head[torch.arange(VOCAB) % 7]
    if nan is not None:
        head[nan] = head[55] = torch.nan
    blocks = BlockManager(NUM_BLOCKS, 16)
    blocks.open(0)
    blocks.reserve(0, 100)
    span = Span(0, 0, _text(0, 100), 70)
    out = _native("llama", threads, model=model).forward(pack([span], blocks, "cpu"))
    assert out.likeliest is not None
    assert torch.equal(out.likeliest, GumbelNoise().likeliest(out.logits))
    assert nan is None or set(out.likeliest.tolist()) == {nan}
    assert nan is not None or not twins or int(out.likeliest.max()) < 7
    assert nan is not None or len(set(out.likeliest.tolist())) > 3


@pytest.mark.parametrize("sparing", [{"OMP_THREAD_LIMIT": "1"}, {"OMP_DYNAMIC": "true"}])
def test_fewer_threads_than_asked_for_are_enough(sparing: dict[str, str]) -> None:
    """Threads wait for each other: one that OpenMP holds back must not be waited for."""
    script = (
        "from tests.common.test_native import _logits, _native\n"
        "from common.engine.block_manager import BlockManager\n"
        "a, b = (_logits(_native('llama', n), [20], BlockManager(4, 16)) for n in (1, 3))\n"
        "assert a.equal(b)"
    )
    subprocess.run(
        [sys.executable, "-c", script], env=os.environ | sparing, check=True, timeout=100
    )


def test_the_faster_kernel_for_one_row_is_taken_on_request_and_told() -> None:
    """It sums in another order, so the target must not call itself row-invariant."""
    model = _model("llama", torch.bfloat16)
    if not _native("llama", model=model).uses_amx:
        pytest.skip("without AMX there is one kernel only")
    exact, _ = build(model, ModelConfig(num_kv_tokens=1536))
    fast, _ = build(
        _model("llama", torch.bfloat16),
        ModelConfig(num_kv_tokens=1536, allow_batch_dependent=True),
    )
    assert is_row_invariant(exact, 16, 96)
    assert not is_row_invariant(fast, 16, 96)


def test_the_loader_finds_the_window() -> None:
    model, _ = build(_model("window", torch.bfloat16), ModelConfig(num_kv_tokens=1536))
    assert isinstance(model, NativeModel)
    expected = _logits(_native("window"), [NUM_TOKENS], BlockManager(NUM_BLOCKS, 16))
    assert torch.equal(_logits(model, [NUM_TOKENS], BlockManager(NUM_BLOCKS, 16)), expected)


def test_what_does_not_fit_runs_through_its_own_modules() -> None:
    """With native attention, unless that is refused or can't be."""
    for family, dtype, asked, backend in (
        ("gpt2", torch.bfloat16, "auto", "cpu"),
        ("llama", torch.bfloat16, "auto", "native"),
        ("llama", torch.bfloat16, "torch", "cpu"),
        ("llama", torch.bfloat16, "reference", "reference"),
        ("llama", torch.float32, "auto", "cpu"),
        ("llama", torch.float64, "auto", "reference"),
        ("gemma2", torch.float16, "auto", "cpu"),
    ):
        config = ModelConfig(num_kv_tokens=512, backend=asked)
        assert build(transformer(family, dtype), config)[0].backend == backend


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden_size": 48}, "multiples of 32"),
        ({"hidden_act": "gelu"}, "llama kind"),
        ({"mlp_bias": True}, "biases"),
    ],
)
def test_refused_with_a_reason(change: dict[str, Any], reason: str) -> None:
    config = LlamaConfig(**(_SHAPE | {"head_dim": 32} | change))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match=reason):
        _native("llama", model=model)
