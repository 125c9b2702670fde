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
        self._choose.argtypes = [ctypes.c_void_p] * 2 + [ctypes.c_int64] * 3 + [ctypes.c_void_p]

    def choose(self, keys: NoiseKeys, domain: Domain, log_w: Tensor) -> Tensor:
        """See `Noise`."""
        if log_w.dtype != torch.float32 or log_w.device.type != "cpu":
            return super().choose(keys, domain, log_w)
        weights, streams = log_w.contiguous(), stream_keys(keys, domain)
        chosen = torch.empty(len(streams), dtype=torch.int64)
        numbers = (*weights.shape, torch.get_num_threads())
        self._choose(streams.data_ptr(), weights.data_ptr(), *numbers, chosen.data_ptr())
        return chosen


def best_noise(cache_dir: str) -> GumbelNoise:
    """The fastest noise of this machine."""
    loaded, _ = library(cache_dir)
    return NativeNoise(loaded) if loaded else GumbelNoise()
