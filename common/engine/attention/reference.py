"""Plain torch, sequence by sequence: the oracle the other backends are tested against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from common.engine.attention import CacheSpec
from common.engine.batch import RaggedBatch


class ReferenceAttention:
    """Gathers a sequence's keys and values through its block table, then calls torch."""

    name = "reference"

    def __init__(self, spec: CacheSpec) -> None:
        num_slots = spec.num_blocks * spec.block_size
        self._block_size = spec.block_size

        def pool(num_heads: int, dim: int) -> Tensor:
            return torch.zeros(num_slots, num_heads, dim, dtype=spec.dtype, device=spec.device)

        self._keys = [pool(s.num_kv_heads, s.head_dim) for s in spec.layers]
        self._values = [pool(s.num_kv_heads, s.value_dim) for s in spec.layers]

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        batch: RaggedBatch,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """See `AttentionBackend`."""
        keys, values = self._keys[layer], self._values[layer]
        keys[batch.slots] = k
        values[batch.slots] = v
        return gathered(
            q, keys, values, batch, scale=scale, sliding_window=sliding_window, softcap=softcap
        )

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        for pool in (*self._keys, *self._values):
            blocks = pool.view(-1, self._block_size, *pool.shape[1:])
            for source, target in copies:
                blocks[target] = blocks[source]


def gathered(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: RaggedBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    """What `attend` returns, once k and v are stored. keys, values [slots, H_kv, D or D_v]"""
    out = q.new_empty(q.shape[0], q.shape[1], values.shape[2])
    for s, slots in enumerate(batch.context_slots):
        rows = slice(int(batch.query_start[s]), int(batch.query_start[s + 1]))
        mask = _causal_mask(rows.stop - rows.start, len(slots), sliding_window, q)
        heads = q[rows].transpose(0, 1)  # [H, m, D]
        out[rows] = _attention(
            heads,
            keys.index_select(0, slots).transpose(0, 1),  # [H_kv, n, D]
            values.index_select(0, slots).transpose(0, 1),
            mask,
            scale,
            softcap,
        ).transpose(0, 1)
    return out


def _causal_mask(m: int, n: int, window: int | None, like: Tensor) -> Tensor | None:
    """What the last m of n positions see, as a term to add to scores. [m, n]; None: all."""
    if m == 1 and (window is None or window >= n):
        return None
    query = torch.arange(n - m, n, device=like.device).unsqueeze(1)
    key = torch.arange(n, device=like.device)
    visible = key <= query
    if window is not None:
        visible &= key > query - window
    return torch.zeros(m, n, dtype=like.dtype, device=like.device).masked_fill_(
        ~visible, -torch.inf
    )


def _attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> Tensor:
    """q [H, m, D], k [H_kv, n, D], v [H_kv, n, D_v] -> [H, m, D_v]"""
    if softcap is None:
        out: Tensor = scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scale, enable_gqa=True
        )[0]
        return out
    groups = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = softcap * torch.tanh(q @ k.transpose(1, 2) * scale / softcap)
    if mask is not None:
        scores = scores + mask
    weights = torch.softmax(scores.to(torch.promote_types(q.dtype, torch.float32)), dim=-1)
    return weights.to(v.dtype) @ v
