"""The CUDA backend over an imitation of torch's kernel, against the reference, in float64.

It was never run on a GPU here; `tests/benchmarks/gpu.sh` compares the two on one.
"""

from __future__ import annotations

import inspect
import random
from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen
from torch import Tensor

from common.engine.attention import AttentionBackend, CacheSpec, KVShape
from common.engine.attention.cuda import CudaAttention, unknown_to_kernel
from common.engine.attention.reference import ReferenceAttention
from common.engine.batch import RaggedBatch, Span, pack
from common.engine.block_manager import BlockManager
from tests import cuda_fakes

BLOCK, NUM_BLOCKS, HEADS, DIM = 4, 24, 4, 8
# Rows that each of three sequences adds in each pass; chunks, single rows, runs, none.
PASSES = [(5, 1, 0), (3, 1, 9), (1, 4, 1), (0, 1, 3), (1, 1, 1), (6, 0, 7)]
CPU = torch.device("cpu")


def test_the_imitation_has_the_signature_of_torch() -> None:
    torchs = inspect.signature(torch.nn.attention.varlen.varlen_attn)
    ours = inspect.signature(cuda_fakes.varlen_attn)
    assert list(ours.parameters) == list(torchs.parameters)
    kinds = [(p.kind, p.default) for p in torchs.parameters.values()]
    assert [(p.kind, p.default) for p in ours.parameters.values()] == kinds


def _spec(kv_heads: int, value_dim: int = DIM, dtype: torch.dtype = torch.float64) -> CacheSpec:
    shape = KVShape(kv_heads, DIM, value_dim)
    return CacheSpec((shape, shape), NUM_BLOCKS, BLOCK, dtype, CPU)


def _both(
    backends: tuple[AttentionBackend, ...],
    batch: RaggedBatch,
    tensors: tuple[Tensor, Tensor, Tensor],
    window: int | None,
    softcap: float | None = None,
) -> list[Tensor]:
    q, k, v = tensors
    return [
        b.attend(1, q, k, v, batch, scale=0.35, sliding_window=window, softcap=softcap)
        for b in backends
    ]


def _compare(
    backends: tuple[CudaAttention, ReferenceAttention],
    kv_heads: int,
    window: int | None,
    atol: float,
    softcap: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> None:
    """Ragged passes, behind shuffled block tables, with a rollback."""
    blocks = BlockManager(NUM_BLOCKS, BLOCK)
    random.Random(0).shuffle(blocks._free)
    lengths = [0, 0, 0]
    generator = torch.Generator().manual_seed(3)
    for sid in range(3):
        blocks.open(sid)
    for i, rows in enumerate(PASSES):
        if i == 3:  # what was beyond is some other sequence's soon
            blocks.truncate(0, 3)
            lengths[0] = 3
        spans = []
        for sid in ((0, 1, 2), (2, 0, 1), (1, 2, 0))[i % 3]:
            if num := rows[sid]:
                assert blocks.reserve(sid, lengths[sid] + num)
                spans.append(Span(sid, lengths[sid], [0] * num, num))
                lengths[sid] += num
        m = sum(rows)
        q, k, v = (
            torch.randn(m, heads, DIM, generator=generator, dtype=torch.float64).to(dtype)
            for heads in (HEADS, kv_heads, kv_heads)
        )
        batch = pack(spans, blocks, "cpu")
        found, expected = _both(backends, batch, (q, k, v), window, softcap)
        torch.testing.assert_close(found, expected, rtol=0.0, atol=atol)


@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_equals_the_reference(kv_heads: int, window: int | None) -> None:
    spec = _spec(kv_heads)
    cuda = cuda_fakes.attention_of(spec, [None, None])
    for pool in (*cuda._keys, *cuda._values):
        pool.fill_(torch.nan)  # what nobody wrote must not be read
    assert cuda.name == "cuda"
    _compare((cuda, ReferenceAttention(spec)), kv_heads, window, 1e-13)


def test_equals_the_reference_in_half_precision_without_pretence() -> None:
    spec = _spec(2, dtype=torch.bfloat16)
    cuda = CudaAttention(spec, [None, None], cuda_fakes.varlen_attn)
    assert cuda.unknown == ["", ""]
    _compare((cuda, ReferenceAttention(spec)), 2, 5, 0.03, dtype=torch.bfloat16)


def test_layers_that_the_kernel_does_not_know_go_through_the_reference() -> None:
    spec = _spec(2)
    cuda = cuda_fakes.attention_of(spec, [None, 0.7])
    assert cuda.name == "cuda+reference"
    assert cuda.unknown == ["", "its attention has a softcap"]
    _compare((cuda, ReferenceAttention(spec)), 2, 3, 1e-13, softcap=0.7)


@pytest.mark.parametrize(
    ("shape", "dtype", "softcap", "why"),
    [
        (KVShape(2, 64, 64), torch.bfloat16, None, ""),
        (KVShape(2, 256, 256), torch.float16, None, ""),
        (KVShape(2, 64, 64), torch.float32, None, "float32 is neither"),
        (KVShape(2, 64, 64), torch.bfloat16, 30.0, "softcap"),
        (KVShape(2, 64, 128), torch.bfloat16, None, "differ in size"),
        (KVShape(2, 60, 60), torch.bfloat16, None, "heads of 60"),
        (KVShape(2, 264, 264), torch.bfloat16, None, "heads of 264"),
    ],
)
def test_what_the_kernel_knows(
    shape: KVShape, dtype: torch.dtype, softcap: float | None, why: str
) -> None:
    found = unknown_to_kernel(shape, dtype, softcap)
    assert why in found
    assert bool(found) is bool(why)


def test_the_index_is_made_once_a_pass() -> None:
    spec = _spec(2)
    seen: list[Tensor] = []

    def watching(*args: Tensor, **named: object) -> Tensor | tuple[Tensor, Tensor]:
        seen.append(args[3])
        return cuda_fakes.varlen_attn(*args, **named)  # type: ignore[arg-type]

    cuda = CudaAttention(_spec(2, dtype=torch.bfloat16), [None, None], watching)
    blocks = BlockManager(NUM_BLOCKS, BLOCK)
    blocks.open(0)
    for stop in (2, 3):
        blocks.reserve(0, stop)
        batch = pack([Span(0, stop - 1, [0], 1)], blocks, "cpu")
        for layer in range(len(spec.layers)):
            q, k = torch.ones(1, HEADS, DIM).bfloat16(), torch.ones(1, 2, DIM).bfloat16()
            cuda.attend(layer, q, k, k, batch, scale=1.0, sliding_window=None, softcap=None)
    assert [x is y for x, y in pairwise(seen)] == [True, False, True]


def test_blocks_are_copied_in_every_layer() -> None:
    cuda = cuda_fakes.attention_of(_spec(2), [None, None])
    pools = (*cuda._keys, *cuda._values)
    for i, pool in enumerate(pools):
        pool[:] = torch.arange(NUM_BLOCKS + 1).view(-1, 1, 1, 1) + 100 * i
    cuda.copy_blocks([(1, 2), (2, 5), (3, 2)])
    for i, pool in enumerate(pools):
        assert (pool[:, 0, 0, 0] - 100 * i).tolist()[:6] == [0, 1, 3, 3, 4, 1]
