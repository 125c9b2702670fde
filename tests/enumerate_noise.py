"""Every outcome of a random program, each with its exact probability.

A program is run again and again, each time down another path of choices. Noise is not
sampled but split: what has been asked of a random number so far is kept as the set of values
it can still have, an interval for a uniform and a polygon for a Gumbel vector, and a new
question splits that set in proportion to its size. Noise shared by two questions is thus
summed over exactly, without quadrature.

For a vector of three Gumbel numbers: argmax(log w + G) is argmin(E / w) with independent
exponentials E = exp(-G); only the direction of E matters, which is uniform on the triangle
E_0 + E_1 + E_2 = 1. "i wins over j" is E_i w_j <= E_j w_i, a line through a corner; so every
question cuts convex polygons out of the triangle, and probabilities are ratios of areas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from common.engine.noise import Domain, NoiseKeys
from common.engine.sampling import likeliest

T = TypeVar("T")
Polygon = list[tuple[float, float]]  # corners in order, coordinates (E_0, E_1)
TRIANGLE: Polygon = [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]
NOTHING = 1e-15  # relative sizes below this are rounding


class Chooser:
    """Follows a given path of choices and takes the first open one after its end."""

    def __init__(self, path: list[tuple[int, list[float]]]) -> None:
        self._given = path
        self.path: list[tuple[int, list[float]]] = []
        self.probability = 1.0

    def pick(self, weights: list[float]) -> int:
        """An index with positive weight; weights sum to 1."""
        if len(self.path) < len(self._given):
            index = self._given[len(self.path)][0]
        else:
            index = next(i for i, w in enumerate(weights) if w > NOTHING)
        self.path.append((index, weights))
        self.probability *= weights[index]
        return index


def outcomes(program: Callable[[Chooser], T]) -> Iterator[tuple[T, float]]:
    """Result and probability of every path."""
    path: list[tuple[int, list[float]]] = []
    while True:
        chooser = Chooser(path)
        yield program(chooser), chooser.probability
        path = chooser.path
        while path:
            index, weights = path.pop()
            later = [i for i in range(index + 1, len(weights)) if weights[i] > NOTHING]
            if later:
                path.append((later[0], weights))
                break
        else:
            return


class EnumeratingNoise:
    """`Noise` for a vocabulary of three that asks a `Chooser` instead of a generator."""

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser
        self._uniforms: dict[tuple[int, int], tuple[float, float]] = {}
        self._gumbels: dict[tuple[int, int, Domain], Polygon] = {}

    def keep(self, keys: NoiseKeys, p: Tensor, q: Tensor) -> Tensor:
        answers = []
        for key, bound in zip(_rows(keys), (p / q).tolist(), strict=True):
            low, high = self._uniforms.get(key, (0.0, 1.0))
            cut = min(max(bound, low), high)
            below = (cut - low) / (high - low)
            answers.append(self._chooser.pick([below, 1.0 - below]) == 0)
            self._uniforms[key] = (low, cut) if answers[-1] else (cut, high)
        return torch.tensor(answers)

    def choose(
        self, keys: NoiseKeys, domain: Domain, log_w: Tensor, likeliest: Tensor | None = None
    ) -> Tensor:
        winners = []
        for (seed, position), w in zip(_rows(keys), log_w.double().exp().tolist(), strict=True):
            key = (seed, position, domain)
            whole = self._gumbels.get(key, TRIANGLE)
            parts = [_where_wins(whole, i, w) for i in range(3)]
            areas = [_area(part) for part in parts]
            winners.append(self._chooser.pick([a / sum(areas) for a in areas]))
            self._gumbels[key] = parts[winners[-1]]
        return torch.tensor(winners)

    def likeliest(self, x: Tensor) -> Tensor:
        return likeliest(x)


def _rows(keys: NoiseKeys) -> list[tuple[int, int]]:
    return list(zip(keys.seeds.tolist(), keys.positions.tolist(), strict=True))


def _where_wins(polygon: Polygon, i: int, w: list[float]) -> Polygon:
    """The part where E_i / w_i is the least of three."""
    if w[i] == 0.0:
        return []
    for j in range(3):
        if j != i and w[j] > 0.0:
            polygon = _clip(polygon, i, j, w)
    return polygon


def _clip(polygon: Polygon, i: int, j: int, w: list[float]) -> Polygon:
    """The part where E_i w_j <= E_j w_i (Sutherland and Hodgman's algorithm)."""

    def side(point: tuple[float, float]) -> float:
        e = (point[0], point[1], 1.0 - point[0] - point[1])
        return e[j] * w[i] - e[i] * w[j]

    clipped: Polygon = []
    for a, b in zip(polygon, polygon[1:] + polygon[:1], strict=True):
        sa, sb = side(a), side(b)
        if sa >= 0:
            clipped.append(a)
        if (sa > 0 > sb) or (sa < 0 < sb):
            t = sa / (sa - sb)
            clipped.append((a[0] + t * (b[0] - a[0]), a[1] + t * (b[1] - a[1])))
    return clipped


def _area(polygon: Polygon) -> float:
    if len(polygon) < 3:
        return 0.0
    x, y = np.array(polygon).T
    return abs(float(np.dot(x, np.roll(y, -1)) - np.dot(y, np.roll(x, -1)))) / 2
