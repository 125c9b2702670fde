"""How fast this machine reads memory: a plain loop, since torch's sums are slower than memory."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import time
from collections.abc import Callable

import numpy as np

from tests.benchmarks.harness import BUILD

BUFFER_BYTES = 1 << 30  # beyond any cache
_SOURCE = r"""
#include <cstddef>
#include <cstdint>

constexpr size_t PIECE = 1 << 17, WIDTH = 32;  // words; several vectors are under way at once

extern "C" uint64_t read_all(const uint64_t* words, size_t num_pieces, int num_threads) {
  uint64_t total = 0;
#pragma omp parallel for num_threads(num_threads) reduction(^ : total) schedule(static)
  for (size_t piece = 0; piece < num_pieces; ++piece) {
    const uint64_t* from = words + piece * PIECE;
    uint64_t sums[WIDTH] = {};
    for (size_t i = 0; i < PIECE; i += WIDTH)
      for (size_t j = 0; j < WIDTH; ++j) sums[j] ^= from[i + j];
    for (size_t j = 0; j < WIDTH; ++j) total ^= sums[j];
  }
  return total;
}
"""
_OPTIONS = ["-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"]
if platform.machine() == "x86_64":
    _OPTIONS.append("-mprefer-vector-width=512")
_PIECE_BYTES = 8 << 17


def reader(threads: int) -> Callable[[], float]:
    """A function that reads a large buffer once and returns bytes per second.

    It is compiled the first time: raises `CalledProcessError` if that fails.
    """
    BUILD.mkdir(exist_ok=True)
    library = BUILD / "read.so"
    command = ["g++", *_OPTIONS, "-o", str(library), "-x", "c++", "-"]
    subprocess.run(command, input=_SOURCE, text=True, check=True)
    read_all = ctypes.CDLL(str(library.resolve())).read_all
    read_all.restype = ctypes.c_uint64
    read_all.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    buffer = np.full(BUFFER_BYTES // 8, 1, np.uint64)

    def rate() -> float:
        began = time.perf_counter()
        read_all(buffer.ctypes.data, BUFFER_BYTES // _PIECE_BYTES, threads)
        return BUFFER_BYTES / (time.perf_counter() - began)

    return rate
