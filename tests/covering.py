"""Covering arrays: few rows in which all combinations of any few columns' values occur."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

NUM_CANDIDATES = 20


def covering(columns: Sequence[Sequence[Any]], strength: int) -> list[tuple[Any, ...]]:
    """Rows in which every combination of values of any `strength` columns occurs.

    Greedy: each row holds a combination that is missing yet, and of some random completions
    the one that brings most others. Always the same rows for the same columns. (Cohen et al.:
    The AETG System: An Approach to Testing Based on Combinatorial Design, 1997.)
    """
    dice = random.Random(1)
    sets = list(combinations(range(len(columns)), strength))
    missing = dict.fromkeys(  # in order, unlike a set
        (places, values) for places in sets for values in product(*[columns[i] for i in places])
    )
    rows = []
    while missing:
        places, values = next(iter(missing))
        fixed = dict(zip(places, values, strict=True))
        candidates = [
            tuple(fixed.get(i, dice.choice(column)) for i, column in enumerate(columns))
            for _ in range(NUM_CANDIDATES)
        ]
        brought = [_combinations(row, sets) for row in candidates]
        num_new = [sum(found in missing for found in some) for some in brought]
        best = num_new.index(max(num_new))
        for found in brought[best]:
            missing.pop(found, None)
        rows.append(candidates[best])
    return rows


def _combinations(
    row: Sequence[Any], sets: Sequence[tuple[int, ...]]
) -> set[tuple[tuple[int, ...], tuple[Any, ...]]]:
    return {(places, tuple(row[i] for i in places)) for places in sets}
