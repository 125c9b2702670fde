"""The noise is pinned down: golden vectors, plain reimplementation, goodness of fit."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare, kstest

from common.engine.noise import (
    NOISE_VERSION,
    Domain,
    GumbelNoise,
    NoiseKeys,
    gumbel,
    stream_keys,
    uniform,
)

MASK, GAMMA = (1 << 64) - 1, 0x9E3779B97F4A7C15

GOLDEN_STREAMS = [3400964856525257824, 4052448592440306160, -4432614178668405011]
GOLDEN_GUMBEL = [
    1.8264278840431893,
    -0.5177384850735405,
    0.05842448855444995,
    -1.7830794039329891,
    -0.7392844874245138,
    2.0096565866475267,
]


def _mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def _plain(seed: int, position: int, domain: Domain, token: int) -> float:
    """The definition, in Python's own integers."""
    h = _mix((seed + GAMMA) & MASK)
    h = _mix(((h ^ position) + GAMMA) & MASK)
    key = _mix(((h ^ domain) + GAMMA) & MASK)
    return ((_mix((key + (token + 1) * GAMMA) & MASK) >> 12) + 0.5) * 2.0**-52


def _keys(*pairs: tuple[int, int]) -> NoiseKeys:
    seeds, positions = zip(*pairs, strict=True)
    return NoiseKeys(np.array(seeds, np.uint64), np.array(positions, np.int64))


@given(st.integers(0, MASK), st.integers(0, 2**31), st.sampled_from(Domain))
def test_equals_the_definition(seed: int, position: int, domain: Domain) -> None:
    u = uniform(stream_keys(_keys((seed, position)), domain), 5)[0].tolist()
    assert u == [_plain(seed, position, domain, v) for v in range(5)]


def test_splitmix64_reference_values() -> None:
    """First outputs of SplitMix64 from seed 1234567, as published with its reference code."""
    state, published = 1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_mix((state + i * GAMMA) & MASK) for i in (1, 2, 3)] == published


def test_golden_vectors() -> None:
    """A change here is a change of `NOISE_VERSION`."""
    assert NOISE_VERSION == "splitmix64-gumbel-1"
    streams = stream_keys(_keys((0, 0), (42, 7), (MASK, 100)), Domain.TOKEN)
    assert streams.tolist() == GOLDEN_STREAMS
    np.testing.assert_allclose(gumbel(streams, 2).flatten(), GOLDEN_GUMBEL, rtol=1e-14)


def test_strictly_inside_the_unit_interval() -> None:
    largest = ((MASK >> 12) + 0.5) * 2.0**-52
    assert 0.5 * 2.0**-52 > 0
    assert largest < 1
    assert math.isfinite(-math.log(-math.log(largest)))


def test_uniforms_are_uniform() -> None:
    """Kolmogorov-Smirnov, 100,000 numbers; false alarm 1e-6 (and the seed is fixed)."""
    keys = _keys(*[(seed, position) for seed in range(100) for position in range(10)])
    u = uniform(stream_keys(keys, Domain.DRAFT), 100).flatten()
    assert kstest(u.numpy(), "uniform").pvalue > 1e-6


def test_neighbouring_positions_and_domains_are_uncorrelated() -> None:
    """Correlations of 50,000 pairs; |r| above 0.025 has probability 2e-8."""
    a = uniform(stream_keys(_keys(*[(1, i) for i in range(5000)]), Domain.TOKEN), 10)
    b = uniform(stream_keys(_keys(*[(1, i + 1) for i in range(5000)]), Domain.TOKEN), 10)
    c = uniform(stream_keys(_keys(*[(1, i) for i in range(5000)]), Domain.RESIDUAL), 10)
    for other in (b, c, a.roll(1, dims=1)):
        r = np.corrcoef(a.flatten(), other.flatten())[0, 1]
        assert abs(r) < 0.025


def test_choice_follows_the_weights() -> None:
    """Chi-square over 50,000 draws; false alarm 1e-6 (and the seed is fixed)."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    keys = _keys(*[(seed, 3) for seed in range(50_000)])
    drawn = GumbelNoise().choose(keys, Domain.TOKEN, p.log().expand(50_000, 5))
    counts = np.bincount(drawn.numpy(), minlength=5)
    assert counts[4] == 0
    assert chisquare(counts[:4], 50_000 * p[:4].double().numpy()).pvalue > 1e-6


def test_a_banned_token_never_passes() -> None:
    keys = _keys(*[(seed, 0) for seed in range(1000)])
    kept = GumbelNoise().keep(keys, torch.zeros(1000), torch.full((1000,), 0.5))
    assert not kept.any()


def test_rows_do_not_depend_on_their_batch() -> None:
    keys = _keys(*[(seed, 5) for seed in range(9)])
    log_w = torch.randn(9, 30_000, generator=torch.Generator().manual_seed(0))
    together = GumbelNoise().choose(keys, Domain.TOKEN, log_w)
    alone = [
        GumbelNoise().choose(keys[np.array([i])], Domain.TOKEN, log_w[i : i + 1]) for i in range(9)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
