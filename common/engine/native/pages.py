"""Memory in huge pages, where the system has them: a step reads every weight once.

With pages of 4 KiB a tenth of that time goes into finding pages (transparent huge pages are on
request only on most systems, so they are asked for here).
"""

from __future__ import annotations

import math
import mmap

import torch
from torch import Tensor

HUGE = 2 << 20
_CHUNK = 64 << 20


class HugePages:
    """Hands out zeroed tensors one behind the other; memory is the system's until written to."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def zeros(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor whose memory begins at a cache line."""
        size = math.prod(shape) * dtype.itemsize
        room = -(-size // 64) * 64
        if room > len(self._free):
            self._free = _map(max(_CHUNK, -(-room // HUGE) * HUGE))
        taken, self._free = self._free[:size], self._free[room:]
        return taken.view(dtype).view(shape)

    def copy(self, tensor: Tensor) -> Tensor:
        """The same numbers in this memory."""
        return self.zeros(*tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _map(size: int) -> Tensor:
    memory = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping
    return whole[-whole.data_ptr() % HUGE :][:size]
