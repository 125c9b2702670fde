"""The attention backends against dense tensors: the reference in float64, the native in float32.

Each sequence keeps its keys and values twice: dense, as an oracle sees them, and in the paged
cache, behind shuffled block tables.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.config import ModelConfig
from common.engine.attention import AttentionBackend, CacheSpec, KVShape
from common.engine.attention.cpu import best_attention
from common.engine.attention.reference import ReferenceAttention
from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.native.build import attention_library

BLOCK, NUM_BLOCKS = 4, 24
CACHE_DIR = ModelConfig().cache_dir
NO_KERNEL = attention_library(CACHE_DIR)[1]
BOUND = {"reference": 1e-13, "cpu": 3e-6}
each_backend = pytest.mark.parametrize(
    "backend",
    ["reference", pytest.param("cpu", marks=pytest.mark.skipif(bool(NO_KERNEL), reason=NO_KERNEL))],
)
# Rows that each of three sequences adds in each of five passes: prompts in chunks, single
# rows, runs; none at all now and then.
PASSES = [(5, 1, 0), (3, 1, 9), (1, 4, 1), (0, 1, 3), (1, 1, 1)]


@dataclass(frozen=True)
class Shape:
    """Heads and sizes of one case."""

    num_heads: int = 4
    num_kv_heads: int = 4
    dim: int = 8
    value_dim: int = 8
    window: int | None = None
    softcap: float | None = None
    scale: float = 0.35


SHAPES = {
    "plain": Shape(),
    "grouped": Shape(num_kv_heads=2),
    "one kv head": Shape(num_kv_heads=1),
    "values of another size": Shape(num_kv_heads=2, value_dim=5),
    "window": Shape(num_kv_heads=2, window=3),
    "window of one": Shape(window=1),
    "window beyond the text": Shape(window=1000),
    "softcap": Shape(softcap=0.7),
    "all at once": Shape(num_kv_heads=2, value_dim=6, window=4, softcap=1.5),
}


def _by_hand(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
    """The formula, score by score. q [m, H, D], k [n, H_kv, D], v [n, H_kv, D_v]"""
    m, n = len(q), len(k)
    out = torch.zeros(m, s.num_heads, s.value_dim, dtype=q.dtype)
    for i in range(m):
        position = n - m + i
        first = 0 if s.window is None else max(0, position - s.window + 1)
        for h in range(s.num_heads):
            kv = h // (s.num_heads // s.num_kv_heads)
            scores = [float(q[i, h] @ k[j, kv]) * s.scale for j in range(first, position + 1)]
            if s.softcap is not None:
                scores = [s.softcap * math.tanh(x / s.softcap) for x in scores]
            weights = [math.exp(x) for x in scores]
            for j, w in enumerate(weights):
                out[i, h] += w / sum(weights) * v[first + j, kv]
    return out


def _by_torch(q: Tensor, k: Tensor, v: Tensor, s: Shape) -> Tensor:
    """All positions causally, of which the last m are wanted."""
    m = len(q)
    whole = q.new_zeros(len(k), *q.shape[1:])
    whole[len(k) - m :] = q
    q, k_heads, v_heads = (x.transpose(0, 1)[None] for x in (whole, k, v))
    out = scaled_dot_product_attention(
        q, k_heads, v_heads, is_causal=True, scale=s.scale, enable_gqa=True
    )
    return out[0].transpose(0, 1)[len(k) - m :]


class Cache:
    """A backend of two layers, and the dense tensors it is to agree with."""

    def __init__(self, shape: Shape, backend: str = "reference") -> None:
        self.shape = shape
        layer = KVShape(shape.num_kv_heads, shape.dim, shape.value_dim)
        self.dtype = torch.float64 if backend == "reference" else torch.float32
        spec = CacheSpec((layer, layer), NUM_BLOCKS, BLOCK, self.dtype, torch.device("cpu"))
        self.backend: AttentionBackend = best_attention(spec, num_threads=2, cache_dir=CACHE_DIR)
        assert self.backend.name == backend
        self.blocks = BlockManager(NUM_BLOCKS, BLOCK)
        random.Random(0).shuffle(self.blocks._free)  # so that tables are in no order
        self.keys = [torch.zeros(0, shape.num_kv_heads, shape.dim).double() for _ in range(3)]
        self.values = [
            torch.zeros(0, shape.num_kv_heads, shape.value_dim).double() for _ in range(3)
        ]
        for sid in range(3):
            self.blocks.open(sid)
        self._random = torch.Generator().manual_seed(3)

    def _normal(self, *size: int) -> Tensor:
        return torch.randn(*size, generator=self._random, dtype=torch.float32).double()

    def attend(self, rows: tuple[int, ...], order: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
        """One pass; what came out and the dense q, k, v of each sequence that took part."""
        s, spans, queries = self.shape, [], []
        for sid in order:
            if num := rows[sid]:
                start = len(self.keys[sid])
                assert self.blocks.reserve(sid, start + num)
                spans.append(Span(sid, start, [0] * num, num))
                queries.append(self._normal(num, s.num_heads, s.dim))
                fresh = self._normal(num, s.num_kv_heads, s.dim)
                self.keys[sid] = torch.cat([self.keys[sid], fresh])
                fresh = self._normal(num, s.num_kv_heads, s.value_dim)
                self.values[sid] = torch.cat([self.values[sid], fresh])
        batch = pack(spans, self.blocks, "cpu")
        out = self.backend.attend(
            1,
            torch.cat(queries).to(self.dtype),
            torch.cat([self.keys[p.sid][p.start :] for p in spans]).to(self.dtype),
            torch.cat([self.values[p.sid][p.start :] for p in spans]).to(self.dtype),
            batch,
            scale=s.scale,
            sliding_window=s.window,
            softcap=s.softcap,
        )
        parts = torch.split(out.double(), [len(q) for q in queries])
        return [
            (part, q, self.keys[p.sid], self.values[p.sid])
            for part, q, p in zip(parts, queries, spans, strict=True)
        ]

    def truncate(self, sid: int, length: int) -> None:
        """Roll a sequence back."""
        self.blocks.truncate(sid, length)
        self.keys[sid], self.values[sid] = self.keys[sid][:length], self.values[sid][:length]


@each_backend
@pytest.mark.parametrize("case", SHAPES)
def test_equals_the_formula(case: str, backend: str) -> None:
    """Ragged mixed batches, the sequences in another order each time."""
    cache = Cache(SHAPES[case], backend)
    for i, rows in enumerate(PASSES):
        for found, q, k, v in cache.attend(rows, ((0, 1, 2), (2, 0, 1), (1, 2, 0))[i % 3]):
            torch.testing.assert_close(
                found, _by_hand(q, k, v, cache.shape), rtol=0.0, atol=BOUND[backend]
            )


@each_backend
@pytest.mark.parametrize("case", ["plain", "grouped", "one kv head", "values of another size"])
def test_equals_torch_on_dense_tensors(case: str, backend: str) -> None:
    cache = Cache(SHAPES[case], backend)
    for rows in PASSES:
        for found, q, k, v in cache.attend(rows, (1, 0, 2)):
            torch.testing.assert_close(
                found, _by_torch(q, k, v, cache.shape), rtol=0.0, atol=BOUND[backend]
            )


@each_backend
def test_blocks_that_changed_hands_hold_nothing_of_the_past(backend: str) -> None:
    """After a rollback other sequences take the blocks; what was there must not be seen."""
    cache = Cache(SHAPES["grouped"], backend)
    cache.attend((14, 9, 0), (0, 1, 2))
    past = {*cache.blocks.table(0)[1:], *cache.blocks.table(1)}
    cache.truncate(0, 3)
    cache.truncate(1, 0)
    for rows in ((2, 7, 9), (5, 1, 8), (1, 6, 1)):
        for found, q, k, v in cache.attend(rows, (2, 1, 0)):
            torch.testing.assert_close(
                found, _by_hand(q, k, v, cache.shape), rtol=0.0, atol=BOUND[backend]
            )
    assert past & set(cache.blocks.table(2))
    assert cache.blocks.table(2) != sorted(cache.blocks.table(2))


def test_layers_have_caches_of_their_own() -> None:
    cache = Cache(SHAPES["plain"])
    ((found, q, k, v),) = cache.attend((4, 0, 0), (0, 1, 2))
    cache.blocks.open(3)
    assert cache.blocks.reserve(3, 4)
    batch = pack([Span(0, 3, [0], 1)], cache.blocks, "cpu")
    other = torch.zeros(1, 4, 8).double()
    cache.backend.attend(
        0, other, other, other, batch, scale=1.0, sliding_window=None, softcap=None
    )
    again = cache.backend.attend(
        1, q[3:], k[3:], v[3:], batch, scale=0.35, sliding_window=None, softcap=None
    )
    torch.testing.assert_close(again, found[3:], rtol=0.0, atol=1e-15)


def test_size_of_a_block() -> None:
    layers = (KVShape(2, 8, 6), KVShape(1, 4, 4))
    spec = CacheSpec(layers, 10, 16, torch.bfloat16, torch.device("cpu"))
    assert spec.bytes_per_block == (2 * (8 + 6) + 1 * (4 + 4)) * 16 * 2


def test_blocks_are_copied_one_after_the_other_in_every_layer() -> None:
    cache = Cache(SHAPES["values of another size"])
    assert isinstance(cache.backend, ReferenceAttention)
    for layer in range(2):
        for pool in (cache.backend._keys[layer], cache.backend._values[layer]):
            pool[:] = torch.arange(len(pool)).view(-1, 1, 1) + 1000 * layer
    cache.backend.copy_blocks([(1, 2), (2, 5), (3, 2)])
    for layer in range(2):
        for pool in (cache.backend._keys[layer], cache.backend._values[layer]):
            found = pool.view(NUM_BLOCKS, BLOCK, -1)[:, :, 0] - 1000 * layer
            expected = torch.arange(NUM_BLOCKS * BLOCK).view(NUM_BLOCKS, BLOCK).clone()
            expected[5], expected[2] = expected[1].clone(), expected[3].clone()
            assert torch.equal(found.long(), expected)
