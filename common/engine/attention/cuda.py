"""Attention on NVIDIA GPUs by the kernels that torch ships: `varlen_attn` over block tables.

As read in torch 2.13 (FlashAttention 2, the one that needs no further package), not as run: no
GPU was at hand. It takes bfloat16 and float16, head sizes of up to 256 that are multiples of 8,
pages of a multiple of 256 tokens, and `cu_seq_k` also where `seqused_k` and the block table say
all; it knows windows, but no softcap. `num_splits=1` keeps it from splitting a context by how
busy the GPU is, so that a row's result does not depend on its batch mates; with more splits its
packed sequences were wrong besides (Dao-AILab/flash-attention, pull request 2812).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from common.engine.attention import CacheSpec, KVShape
from common.engine.attention.reference import gathered
from common.engine.batch import RaggedBatch

PAGE_MULTIPLE, DIM_MULTIPLE, MAX_DIM = 256, 8, 256
MIN_CAPABILITY = (8, 0)  # Ampere


@dataclass(frozen=True)
class VarlenIndex:
    """Which rows and pages belong to which of S sequences, as `varlen_attn` takes it; int32."""

    query_start: Tensor  # [S + 1]
    context_start: Tensor  # [S + 1] as if every sequence had all its table's slots
    context_len: Tensor  # [S]
    block_table: Tensor  # [S, B]
    max_rows: int  # no sequence has more rows
    max_context: int  # slots of a whole table

    @classmethod
    def of(cls, batch: RaggedBatch) -> VarlenIndex:
        """The index of a batch, on the device of its block table."""
        table = batch.block_table
        most = table.shape[1] * batch.block_size

        def on_device(array: Tensor) -> Tensor:
            return array.to(table.device, torch.int32)

        return cls(
            query_start=on_device(torch.from_numpy(batch.query_start)),
            context_start=on_device(torch.arange(batch.num_sequences + 1) * most),
            context_len=on_device(torch.from_numpy(batch.context_len)),
            block_table=on_device(table),
            max_rows=int((batch.query_start[1:] - batch.query_start[:-1]).max()),
            max_context=most,
        )


@dataclass(frozen=True)
class IndexedBatch(RaggedBatch):
    """A batch that brings its index along; a graph's, whose index lies in fixed tensors."""

    index: VarlenIndex


class CudaAttention:
    """Pages of keys and values on a GPU; a page more than asked for is left to padding.

    Layers that the kernel does not know (`unknown`) go through the reference, on the same pages.
    softcaps [layers]. `varlen` stands for torch's function; tests put one for CPUs in its place.
    """

    def __init__(
        self,
        spec: CacheSpec,
        softcaps: Sequence[float | None],
        varlen: Callable[..., Tensor | tuple[Tensor, Tensor]] = varlen_attn,
    ) -> None:
        self._varlen = varlen
        self.scratch_block = spec.num_blocks
        shape = (spec.num_blocks + 1, spec.block_size)

        def pool(num_heads: int, dim: int) -> Tensor:
            return torch.zeros(*shape, num_heads, dim, dtype=spec.dtype, device=spec.device)

        self._keys = [pool(s.num_kv_heads, s.head_dim) for s in spec.layers]
        self._values = [pool(s.num_kv_heads, s.value_dim) for s in spec.layers]
        layers = zip(spec.layers, softcaps, strict=True)
        self.unknown = [unknown_to_kernel(s, spec.dtype, softcap) for s, softcap in layers]
        self.name = "cuda" if not any(self.unknown) else "cuda+reference"
        self._indexed: tuple[RaggedBatch, VarlenIndex] | None = None  # of the pass that runs

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
        keys.flatten(0, 1)[batch.slots] = k
        values.flatten(0, 1)[batch.slots] = v
        if self.unknown[layer]:
            return gathered(
                q,
                keys.flatten(0, 1),
                values.flatten(0, 1),
                batch,
                scale=scale,
                sliding_window=sliding_window,
                softcap=softcap,
            )
        assert softcap is None, "the probe saw a layer without softcap"
        index = self._index_of(batch)
        out = self._varlen(
            q,
            keys,
            values,
            index.query_start,
            index.context_start,
            index.max_rows,
            index.max_context,
            scale=scale,
            window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
            enable_gqa=True,
            seqused_k=index.context_len,
            block_table=index.block_table,
            num_splits=1,
        )
        assert isinstance(out, Tensor), "only the output was asked for"
        return out

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        for pool in (*self._keys, *self._values):
            for source, target in copies:
                pool[target] = pool[source]

    def _index_of(self, batch: RaggedBatch) -> VarlenIndex:
        """Made once a pass, in its first layer."""
        if isinstance(batch, IndexedBatch):
            return batch.index
        if self._indexed is None or self._indexed[0] is not batch:
            self._indexed = batch, VarlenIndex.of(batch)
        return self._indexed[1]


def unknown_to_kernel(shape: KVShape, dtype: torch.dtype, softcap: float | None) -> str:
    """Why the kernel can't do a layer; empty where it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} is neither bfloat16 nor float16"
    if softcap is not None:
        return "its attention has a softcap"
    if shape.head_dim != shape.value_dim:
        return "its keys and values differ in size"
    if shape.head_dim % DIM_MULTIPLE or shape.head_dim > MAX_DIM:
        return f"heads of {shape.head_dim} are no multiple of {DIM_MULTIPLE} up to {MAX_DIM}"
    return ""
