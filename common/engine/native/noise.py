"""`GumbelNoise` with its logarithms taken only where they can win; the same choices."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from common.engine.native.build import library
from common.engine.noise import Domain, GumbelNoise, NoiseKeys, stream_keys


class NativeNoise(GumbelNoise):
    """Chooses natively among float32 weights on CPU, and as `GumbelNoise` does otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose = library.tandem_choose
        self._choose.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]

    def choose(
        self, keys: NoiseKeys, domain: Domain, log_w: Tensor, likeliest: Tensor | None = None
    ) -> Tensor:
        """See `Noise`."""
        if not _fits(log_w):
            return super().choose(keys, domain, log_w)
        return self._run(stream_keys(keys, domain), log_w, likeliest)

    def likeliest(self, x: Tensor) -> Tensor:
        """See `Noise`."""
        return self._run(None, x, None) if _fits(x) else super().likeliest(x)

    def _run(self, streams: Tensor | None, rows: Tensor, likeliest: Tensor | None) -> Tensor:
        rows, chosen = rows.contiguous(), torch.empty(len(rows), dtype=torch.int64)
        told = [None if t is None else t.data_ptr() for t in (streams, likeliest)]
        threads = torch.get_num_threads()
        self._choose(*told, rows.data_ptr(), *rows.shape, threads, chosen.data_ptr())
        return chosen


def _fits(rows: Tensor) -> bool:
    return rows.dtype == torch.float32 and rows.device.type == "cpu"


def best_noise(cache_dir: str) -> GumbelNoise:
    """The fastest noise of this machine."""
    loaded, _ = library(cache_dir)
    return NativeNoise(loaded) if loaded else GumbelNoise()
