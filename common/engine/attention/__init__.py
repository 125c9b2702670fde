"""One seam, a file a backend: queries against keys and values behind block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from common.engine.batch import RaggedBatch


@dataclass(frozen=True)
class KVShape:
    """Size of the cache of one layer."""

    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class CacheSpec:
    """Size of a whole KV cache."""

    layers: tuple[KVShape, ...]
    num_blocks: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_block(self) -> int:
        """Memory of one block over all layers."""
        per_slot = sum(s.num_kv_heads * (s.head_dim + s.value_dim) for s in self.layers)
        return per_slot * self.block_size * self.dtype.itemsize


class AttentionBackend(Protocol):
    """Owns the KV cache of a model; one thread uses it."""

    name: str

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
        """Store k and v in the batch's slots, then attend causally within each sequence.

        q [M, H, D], k [M, H_kv, D], v [M, H_kv, D_v] -> [M, H, D_v]. Query head h reads KV
        head h // (H / H_kv). With a sliding window w a row sees the last w positions, its own
        included; a softcap c replaces a score s by c * tanh(s / c).
        """

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to) in all layers, one after the other."""
