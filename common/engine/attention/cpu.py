"""Attention in C++ for any model on CPU: reads the cache through block tables, gathers nothing.

A row's result is the same bits in any batch, with any number of threads and however its prompt
was cut; see `native/attention.cpp`.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from common.engine.attention import AttentionBackend, CacheSpec, KVShape
from common.engine.attention.reference import ReferenceAttention
from common.engine.batch import RaggedBatch
from common.engine.native.build import attention_library

log = logging.getLogger(__name__)

KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
KEY_PAD, VALUE_PAD = 2, 32  # as in attention.cpp
_int, _float, _pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Call(ctypes.Structure):
    """As in attention.cpp."""

    _fields_ = (
        *((n, _int) for n in ("kind", "num_rows", "num_sequences", "table_width", "num_heads")),
        *((n, _int) for n in ("num_kv_heads", "head_dim", "value_dim", "block_size")),
        *((n, _int) for n in ("num_threads", "window")),
        *((n, _float) for n in ("scale", "softcap")),
        *((n, _pointer) for n in ("q", "k", "v", "keys", "values", "out")),
        *((n, _int) for n in ("q_row", "q_head", "k_row", "k_head", "v_row", "v_head")),
        *((n, _pointer) for n in ("slots", "query_start", "context_len", "block_table")),
    )


class CpuAttention:
    """Owns pools of keys and values that are laid out as the kernel reads them."""

    name = "cpu"

    def __init__(self, spec: CacheSpec, library: ctypes.CDLL, num_threads: int) -> None:
        self._attend = library.tandem_attend
        self._attend.argtypes = [_pointer]
        self._attend.restype = None
        library.tandem_advise.argtypes = [_pointer, _int]
        self._dtype = spec.dtype

        def pool(shape: KVShape, dim: int) -> Tensor:  # zeros, so that padding is no NaN
            size = spec.block_size * dim
            blocks = torch.zeros(spec.num_blocks, shape.num_kv_heads, size, dtype=spec.dtype)
            library.tandem_advise(blocks.data_ptr(), blocks.nbytes)
            return blocks

        self._keys = [pool(s, _padded(s.head_dim, KEY_PAD)) for s in spec.layers]
        self._values = [pool(s, _padded(s.value_dim, VALUE_PAD)) for s in spec.layers]
        self._calls = [
            _Call(
                kind=KINDS[spec.dtype],
                num_kv_heads=s.num_kv_heads,
                head_dim=s.head_dim,
                value_dim=s.value_dim,
                block_size=spec.block_size,
                num_threads=num_threads,
                keys=keys.data_ptr(),
                values=values.data_ptr(),
            )
            for s, keys, values in zip(spec.layers, self._keys, self._values, strict=True)
        ]

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
        rows = [self._readable(x) for x in (q, k, v)]
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=self._dtype)
        call = self._calls[layer]
        call.num_rows, call.num_heads = q.shape[:2]
        call.scale, call.softcap, call.window = scale, softcap or 0.0, sliding_window or 0
        call.q, call.k, call.v = (x.data_ptr() for x in rows)
        (call.q_row, call.q_head), (call.k_row, call.k_head), (call.v_row, call.v_head) = (
            x.stride()[:2] for x in rows
        )
        call.out = out.data_ptr()
        call.num_sequences, call.table_width = batch.block_table.shape
        call.slots, call.block_table = batch.slots.data_ptr(), batch.block_table.data_ptr()
        call.query_start = batch.query_start.ctypes.data
        call.context_len = batch.context_len.ctypes.data
        self._attend(ctypes.byref(call))  # without the GIL
        return out.to(q.dtype)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `AttentionBackend`."""
        for pool in (*self._keys, *self._values):
            for source, target in copies:
                pool[target] = pool[source]

    def _readable(self, x: Tensor) -> Tensor:
        """In the cache's dtype, each head's numbers side by side; nearly always x itself."""
        x = x.to(self._dtype)
        return x if x.stride(2) == 1 else x.contiguous()


def best_attention(spec: CacheSpec, *, num_threads: int, cache_dir: str) -> AttentionBackend:
    """The fastest attention of this machine for such a cache; says so where it is not native."""
    if spec.device.type != "cpu" or spec.dtype not in KINDS:
        reason = f"{spec.dtype} on {spec.device.type} has no native one".removeprefix("torch.")
    else:
        library, reason = attention_library(cache_dir)
        if library is not None:
            return CpuAttention(spec, library, num_threads)
    log.info("attention runs through torch: %s", reason)
    return ReferenceAttention(spec)


def _padded(size: int, to: int) -> int:
    return -(-size // to) * to
