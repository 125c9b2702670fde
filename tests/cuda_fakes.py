"""What a GPU would do, on a CPU: torch's `varlen_attn` in plain torch, and a capture of graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from common.engine.attention import CacheSpec, KVShape
from common.engine.attention.cuda import CudaAttention, unknown_to_kernel
from common.engine.cuda_model import GraphedModel, captured
from common.engine.paged_model import ATTENTION_NAME, PagedModel
from common.engine.probe import probe


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """As documented for torch 2.13, in the ways that are used here; rows outside: garbage."""
    assert seqused_k is not None, "a block table needs it"
    assert block_table is not None
    assert cu_seq_k is not None, "FlashAttention 2 wants it, though it uses the other two"
    assert all(t.dtype == torch.int32 for t in (cu_seq_q, cu_seq_k, seqused_k, block_table))
    assert len(cu_seq_q) == len(cu_seq_k) == len(seqused_k) + 1 == len(block_table) + 1
    assert return_aux is None
    assert scale is not None
    assert num_splits == 1
    assert enable_gqa or query.shape[1] == key.shape[2]
    num_pages, page_size = key.shape[:2]
    assert max_k == block_table.shape[1] * page_size
    out = torch.full_like(query, torch.nan)
    groups = query.shape[1] // key.shape[2]
    for s, (first, end) in enumerate(
        zip(cu_seq_q[:-1].tolist(), cu_seq_q[1:].tolist(), strict=True)
    ):
        num, n = end - first, int(seqused_k[s])
        assert num <= max_q
        assert n <= max_k
        pages = block_table[s, : -(-n // page_size)].long()
        assert bool((pages < num_pages).all())
        k = key[pages].flatten(0, 1)[:n].repeat_interleave(groups, 1)  # [n, H, D]
        v = value[pages].flatten(0, 1)[:n].repeat_interleave(groups, 1)
        at = torch.arange(n - num, n)[:, None] - torch.arange(n)  # how far back a key lies
        left, right = window_size
        seen = (at <= left if left >= 0 else at == at) & (at >= -right if right >= 0 else at == at)
        scores = torch.einsum("mhd,nhd->hmn", query[first:end], k) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[first:end] = torch.einsum("hmn,nhd->mhd", weights, v)
    return out


class FakeCapture:
    """Like a graph: the same tensors each time, and the last output is overwritten."""

    def __init__(self) -> None:
        self.num_replays = 0

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        out = run().clone()

        def replay() -> Tensor:
            self.num_replays += 1
            out.copy_(run())
            return out

        return replay


def attention_of(spec: CacheSpec, softcaps: Sequence[float | None]) -> CudaAttention:
    """The backend over the kernel's imitation, which takes any dtype and size of heads."""

    def unknown(shape: KVShape, dtype: torch.dtype, softcap: float | None) -> str:
        return unknown_to_kernel(KVShape(1, 64, 64), torch.bfloat16, softcap)

    with patch("common.engine.attention.cuda.unknown_to_kernel", unknown):
        return CudaAttention(spec, softcaps, varlen_attn)


def cuda_like(
    model: Any, *, num_blocks: int, block_size: int, capture: FakeCapture | None
) -> tuple[PagedModel | GraphedModel, CudaAttention]:
    """A transformers model as the loader builds it for a GPU; without a capture: no graphs."""
    _, calls = probe(model)
    layers = tuple(KVShape(c.num_kv_heads, c.head_dim, c.value_dim) for c in calls)
    spec = CacheSpec(layers, num_blocks, block_size, model.dtype, model.device)
    attention = attention_of(spec, [c.softcap for c in calls])
    model.set_attn_implementation(ATTENTION_NAME)
    config = model.config.get_text_config()
    paged = PagedModel(model, attention, config.vocab_size, config.max_position_embeddings)
    if capture is None:
        return paged, attention
    graphed = captured(
        paged, attention, num_blocks=num_blocks, block_size=block_size, capture=capture
    )
    return graphed, attention
