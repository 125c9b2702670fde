"""Seeds out of seeds: whole numbers in, whole numbers out, the same on every machine.

The mixing function is SplitMix64's (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014), as in `common/engine/noise.py`, which does it for whole arrays.
"""

from __future__ import annotations

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB


def hash_seed(seed: int, index: int) -> int:
    """The seed of the index-th choice of a request, 64 bits; the first keeps the seed itself."""
    if index == 0:
        return seed
    return mix((mix((seed + GAMMA) & MASK) ^ index) + GAMMA)


def mix(z: int) -> int:
    """A permutation of the 64-bit numbers in which every bit depends on every other."""
    z &= MASK
    z = ((z ^ (z >> 30)) * MIX_1) & MASK
    z = ((z ^ (z >> 27)) * MIX_2) & MASK
    return z ^ (z >> 31)
