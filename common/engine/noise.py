"""Counter-based noise: the same numbers for the same key, anywhere, in any order.

The generator is SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014): the v-th number of a stream is mix(key + (v + 1) * GAMMA). A stream's
key absorbs seed, absolute position and domain, so noise for acceptance, for residual
sampling and for drafting is independent, and the noise of a token never depends on which
other tokens are looked at. Golden vectors pin it down; a change is a new `NOISE_VERSION`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.engine.sampling import likeliest
from common.seeds import GAMMA, MIX_1, MIX_2
from common.types import IntArray

NOISE_VERSION = "splitmix64-gumbel-1"

UIntArray = npt.NDArray[np.uint64]


class Domain(IntEnum):
    """What a number is used for; numbers of different domains are independent."""

    TOKEN = 1  # the target's own draw, and under COUPLED the draft's too
    ACCEPT = 2  # r of the rejection rule
    RESIDUAL = 3  # the token in place of a rejected one, or the bonus, under REJECTION
    DRAFT = 4  # the draft's draw under REJECTION


@dataclass(frozen=True)
class NoiseKeys:
    """Whose noise: one seed and one absolute position a row."""

    seeds: UIntArray  # [N]
    positions: IntArray  # [N]

    def __getitem__(self, rows: IntArray) -> NoiseKeys:
        return NoiseKeys(self.seeds[rows], self.positions[rows])


class Noise(Protocol):
    """The random decisions there are; tests put an enumerating one in its place."""

    def keep(self, keys: NoiseKeys, p: Tensor, q: Tensor) -> Tensor:
        """Whether min(1, p/q) >= r, as r * q < p so that p = 0 never passes. [N] bool."""

    def choose(
        self, keys: NoiseKeys, domain: Domain, log_w: Tensor, likeliest: Tensor | None = None
    ) -> Tensor:
        """One index a row with probability proportional to exp(log_w). [N, V] -> [N] int64.

        likeliest [N]: where a row is largest, or was before the sampler; only a place to begin.
        """

    def likeliest(self, x: Tensor) -> Tensor:
        """The choice without noise: where a row is largest, the lowest of equals. [N, V] -> [N]"""


CHUNK, DEVICE_CHUNK = 1 << 16, 1 << 24
"""Numbers made at once: as many rows as fit a processor's cache, one at least; on another device
so many that starting its kernels is no matter, and memory none either."""


class GumbelNoise:
    """The real noise: argmax(log w + G), with G = -log(-log u) standard Gumbel."""

    def keep(self, keys: NoiseKeys, p: Tensor, q: Tensor) -> Tensor:
        """See `Noise`."""
        r = uniform(stream_keys(keys, Domain.ACCEPT).to(p.device), 1).squeeze(1)
        return r * q < p

    def choose(
        self, keys: NoiseKeys, domain: Domain, log_w: Tensor, likeliest: Tensor | None = None
    ) -> Tensor:
        """See `Noise`."""
        chunk = CHUNK if log_w.device.type == "cpu" else DEVICE_CHUNK
        num = max(1, chunk // log_w.shape[1])
        streams = stream_keys(keys, domain).to(log_w.device)
        chosen = [
            (gumbel(some, log_w.shape[1]).add_(w)).argmax(dim=-1)
            for some, w in zip(torch.split(streams, num), torch.split(log_w, num), strict=True)
        ]
        return torch.cat(chosen)

    def likeliest(self, x: Tensor) -> Tensor:
        """See `Noise`."""
        return likeliest(x)


def stream_keys(keys: NoiseKeys, domain: Domain) -> Tensor:
    """One 64-bit stream key a row, as int64. [N]"""
    with np.errstate(over="ignore"):
        h = _mix(keys.seeds + np.uint64(GAMMA))
        h = _mix((h ^ keys.positions.astype(np.uint64)) + np.uint64(GAMMA))
        h = _mix((h ^ np.uint64(domain)) + np.uint64(GAMMA))
    return torch.from_numpy(h.view(np.int64))


def uniform(streams: Tensor, n: int) -> Tensor:
    """The first n uniforms of each stream, strictly inside (0, 1), float64. [N] -> [N, n]"""
    steps = torch.arange(1, n + 1, dtype=torch.int64, device=streams.device).mul_(_signed(GAMMA))
    z = streams.unsqueeze(1) + steps  # wraps around, like the 64-bit arithmetic it stands for
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))
    # 52 bits and a half: the largest value, 1 - 2**-53, is still a float64 below 1.
    bits = z.bitwise_right_shift_(12).bitwise_and_((1 << 52) - 1)
    return bits.double().add_(0.5).mul_(2.0**-52)


def gumbel(streams: Tensor, n: int) -> Tensor:
    """The first n standard Gumbel numbers of each stream, float64. [N] -> [N, n]"""
    return uniform(streams, n).log_().neg_().log_().neg_()


def _mix(z: UIntArray) -> UIntArray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(MIX_1)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(MIX_2)
    return z ^ (z >> np.uint64(31))


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
