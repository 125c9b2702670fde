"""The native attention against the reference in float64, and the same bits in any batch.

Every test runs what this processor would get and what lesser ones would; all blocks have held
NaN before, and tables are in no order.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from common.config import ModelConfig
from common.engine.attention import AttentionBackend, CacheSpec, KVShape
from common.engine.attention.cpu import CpuAttention, best_attention
from common.engine.attention.reference import ReferenceAttention
from common.engine.batch import RaggedBatch, Span, pack
from common.engine.block_manager import BlockManager
from common.engine.native import build
from common.engine.native.build import LEVELS, attention_library, processor_flags

CACHE = ModelConfig().cache_dir
pytestmark = pytest.mark.skipif(
    attention_library(CACHE)[0] is None, reason=f"none here: {attention_library(CACHE)[1]}"
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
_HERE = [needed for needed, _ in LEVELS if needed <= processor_flags()]
PROCESSORS = dict(zip(("best", "next", "last"), _HERE, strict=False))


@dataclass(frozen=True)
class Shape:
    """Heads, sizes and what changes the mathematics."""

    num_kv_heads: int
    groups: int
    dim: int
    value_dim: int
    window: int | None
    softcap: float | None
    block_size: int
    dtype: torch.dtype
    spread: float = 1.0


def _shapes() -> st.SearchStrategy[Shape]:
    dims = st.sampled_from([1, 8, 20, 64, 65, 80, 256, 288])
    return st.builds(
        Shape,
        num_kv_heads=st.sampled_from([1, 2, 3]),
        groups=st.sampled_from([1, 2, 3, 4, 7, 8, 9, 40]),
        dim=dims,
        value_dim=dims,
        window=st.sampled_from([None, None, 1, 5, 100, 300, 5000]),
        softcap=st.sampled_from([None, None, 0.7, 30.0]),
        block_size=st.sampled_from([1, 4, 8, 16, 16, 16, 24, 32, 256]),
        dtype=st.sampled_from(DTYPES),
        spread=st.sampled_from([0.1, 1.0, 6.0]),
    )


def _library(processor: str) -> ctypes.CDLL:
    library, reason = attention_library(CACHE, PROCESSORS[processor])
    assert library, reason
    return library


@dataclass(frozen=True)
class Text:
    """Queries, keys and values of a sequence. [n, H, D], [n, H_kv, D], [n, H_kv, D_v]"""

    q: Tensor
    k: Tensor
    v: Tensor


def _text(shape: Shape, length: int, seed: int) -> Text:
    random_ = torch.Generator().manual_seed(seed)

    def normal(heads: int, dim: int) -> Tensor:
        return torch.randn(length, heads, dim, generator=random_).to(shape.dtype)

    q = normal(shape.num_kv_heads * shape.groups, shape.dim) * shape.spread
    return Text(
        q, normal(shape.num_kv_heads, shape.dim), normal(shape.num_kv_heads, shape.value_dim)
    )


class Cache:
    """A backend of one layer in which sequences grow row by row."""

    def __init__(
        self, shape: Shape, lengths: Sequence[int], processor: str | None, threads: int = 1
    ) -> None:
        size = shape.block_size
        num_blocks = sum(-(-n // size) for n in lengths) + 2
        layer = KVShape(shape.num_kv_heads, shape.dim, shape.value_dim)
        dtype = shape.dtype if processor else torch.float64
        spec = CacheSpec((layer,), num_blocks, size, dtype, torch.device("cpu"))
        self.backend: AttentionBackend = ReferenceAttention(spec)
        if processor:
            self.backend = CpuAttention(spec, _library(processor), threads)
        self.shape, self.dtype = shape, dtype
        self.blocks = BlockManager(num_blocks, size)
        random.Random(0).shuffle(self.blocks._free)
        if processor:
            self._spoil(num_blocks * size)
        self.cached = [0] * len(lengths)
        for sid in range(len(lengths)):
            self.blocks.open(sid)

    def _spoil(self, num_slots: int) -> None:
        """Every slot has been another's, whose numbers had gone wrong."""
        self.blocks.open(99)
        assert self.blocks.reserve(99, num_slots)
        text = _text(self.shape, num_slots, 0)
        bad = Text(text.q, text.k * torch.nan, text.v * torch.nan)
        batch = pack([Span(99, 0, [0] * num_slots, 1)], self.blocks, "cpu")
        self._attend(bad.q, bad.k, bad.v, batch)
        self.blocks.free(99)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, batch: RaggedBatch) -> Tensor:
        s = self.shape
        q, k, v = (x.to(self.dtype) for x in (q, k, v))
        found = self.backend.attend(
            0, q, k, v, batch, scale=s.dim**-0.5, sliding_window=s.window, softcap=s.softcap
        )
        assert found.dtype == self.dtype
        return found

    def grow(self, texts: Sequence[Text], rows: dict[int, int]) -> dict[int, Tensor]:
        """The next rows of some sequences in one pass. [rows, H, D_v] of each"""
        spans, parts = [], []
        for sid, num in rows.items():
            start = self.cached[sid]
            self.cached[sid] += num
            assert self.blocks.reserve(sid, self.cached[sid])
            spans.append(Span(sid, start, [0] * num, num))
            where = slice(start, self.cached[sid])
            parts.append((texts[sid].q[where], texts[sid].k[where], texts[sid].v[where]))
        q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        found = self._attend(q, k, v, pack(spans, self.blocks, "cpu"))
        return dict(zip(rows, torch.split(found, list(rows.values())), strict=True))


def _tables(lengths: Sequence[int], seed: int) -> list[dict[int, int]]:
    """Passes that together make up all lengths: single rows, runs, chunks, some together."""
    rng = random.Random(seed)
    left, passes = dict(enumerate(lengths)), []
    while left:
        rows = {}
        for sid in rng.sample(list(left), rng.randint(1, len(left))):
            rows[sid] = min(left[sid], rng.choice([1, 1, 2, 3, 9, 40, 200, 500]))
            left[sid] -= rows[sid]
        left = {sid: n for sid, n in left.items() if n}
        passes.append(rows)
    return passes


LENGTHS = st.lists(st.sampled_from([1, 3, 17, 64, 255, 256, 257, 600]), min_size=1, max_size=3)


@pytest.mark.parametrize("processor", PROCESSORS)
@settings(max_examples=40)
@given(shape=_shapes(), lengths=LENGTHS, seed=st.integers(0, 1000))
def test_near_the_reference_in_float64(
    processor: str, shape: Shape, lengths: list[int], seed: int
) -> None:
    texts = [_text(shape, n, seed + i) for i, n in enumerate(lengths)]
    ours, exact = Cache(shape, lengths, processor, 2), Cache(shape, lengths, None)
    for rows in _tables(lengths, seed):
        expected = exact.grow(texts, rows)
        for sid, found in ours.grow(texts, rows).items():
            torch.testing.assert_close(
                found.double(), expected[sid], rtol=torch.finfo(shape.dtype).eps, atol=2e-5
            )


@pytest.mark.parametrize("processor", PROCESSORS)
@settings(max_examples=25)
@given(shape=_shapes(), lengths=LENGTHS, seed=st.integers(0, 1000), threads=st.integers(1, 3))
def test_rows_are_the_same_bits_in_any_batch(
    processor: str, shape: Shape, lengths: list[int], seed: int, threads: int
) -> None:
    """Each text alone in one piece on one thread, and all in pieces, mixed, on some threads."""
    texts = [_text(shape, n, seed + i) for i, n in enumerate(lengths)]
    alone = Cache(shape, lengths, processor)
    whole = [alone.grow(texts, {sid: n})[sid] for sid, n in enumerate(lengths)]
    mixed, done = Cache(shape, lengths, processor, threads), [0] * len(lengths)
    for rows in _tables(lengths, seed):
        for sid, found in mixed.grow(texts, rows).items():
            expected = whole[sid][done[sid] : done[sid] + rows[sid]]
            assert torch.equal(found, expected)
            assert not found.isnan().any()
            done[sid] += rows[sid]
    assert done == lengths


PLAIN = Shape(2, 3, 64, 64, None, None, 16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_wrong_numbers_of_a_row_reach_only_rows_that_see_it(
    processor: str, dtype: torch.dtype
) -> None:
    shape = Shape(2, 3, 64, 64, None, None, 16, dtype)
    text = _text(shape, 90, 1)
    clean = Cache(shape, [90], processor).grow([text], {0: 90})[0]
    for name in ("k", "v", "q"):
        for wrong in (torch.nan, torch.inf):
            spoilt = Text(text.q.clone(), text.k.clone(), text.v.clone())
            getattr(spoilt, name)[71] = wrong
            found = Cache(shape, [90], processor).grow([spoilt], {0: 90})[0]
            assert torch.equal(found[:71], clean[:71])
            assert not torch.isfinite(found[71]).any()
            if name == "q":
                assert torch.equal(found[72:], clean[72:])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_copied_blocks_are_read_as_the_first(processor: str) -> None:
    """Two layers; a fork goes on over its own copy of the last block."""
    cache, text = Cache(PLAIN, [60, 60], processor), _text(PLAIN, 60, 5)
    expected = cache.grow([text, text], {0: 60})[0]
    cache.blocks.truncate(0, 40)
    cache.cached[0] = 40
    cache.blocks.free(1)
    cache.blocks.fork(0, 1, 39)
    cache.cached[1] = 39
    assert cache.blocks.reserve(1, 60)
    cache.backend.copy_blocks(cache.blocks.take_copies())
    other = _text(PLAIN, 60, 6)
    cache.grow([other, text], {0: 8})
    assert torch.equal(cache.grow([other, text], {1: 21})[1], expected[39:])


def test_strides_and_dtypes_as_models_give_them() -> None:
    """Heads before rows, slices of one product, float32 queries over a bfloat16 cache."""
    cache, text = Cache(PLAIN, [20], "best"), _text(PLAIN, 20, 2)
    expected = cache.grow([text], {0: 20})[0]
    batch = pack([Span(0, 0, [0] * 20, 1)], cache.blocks, "cpu")
    attend = partial(cache.backend.attend, scale=0.125, sliding_window=None, softcap=None)
    rows = (text.q, text.k, text.v)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in rows]
    sliced = torch.cat(rows, 1).tensor_split([6, 8], 1)
    dims_first = [x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in rows]
    for q, k, v in (heads_first, sliced, dims_first):
        assert torch.equal(attend(0, q, k, v, batch), expected)
    found = attend(0, text.q.float(), text.k, text.v, batch)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected.float())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_the_best_is_native_where_it_can_be(dtype: torch.dtype) -> None:
    spec = CacheSpec((KVShape(1, 8, 8),), 4, 16, dtype, torch.device("cpu"))
    best = best_attention(spec, num_threads=1, cache_dir=CACHE)
    assert best.name == ("reference" if dtype == torch.float64 else "cpu")


def test_without_a_compiler_the_reference_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    spec = CacheSpec((KVShape(1, 8, 8),), 4, 16, torch.float32, torch.device("cpu"))
    with caplog.at_level("INFO"):
        best = best_attention(spec, num_threads=1, cache_dir=str(tmp_path))
    assert best.name == "reference"
    assert "attention runs through torch: there is no C++ compiler" in caplog.text


def test_what_does_not_compile_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "attention.cpp"
    source.write_text("nonsense;")
    monkeypatch.setattr(build, "ATTENTION", (source,))
    library, reason = attention_library(str(tmp_path))
    assert library is None
    assert "could not compile attention.cpp: " in reason
