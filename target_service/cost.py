"""What a step costs: measured at load (`warmup.py`), kept up with while serving.

The shape comes from steps of 1, 2, 4, ... rows run before the service is ready; how the
machine does today comes from every step since. Decisions need differences between steps that
were never run side by side, so the two are learnt apart: a common factor at once, the shape
slowly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from common.types import FloatArray, IntArray

_FACTOR_RATE, _SHAPE_RATE = 0.05, 0.01  # shares of a step's surprise that are learnt from it


class Shape(NamedTuple):
    """What a step's time depends on; each may be an array [N] of alternatives."""

    rows: int | IntArray  # with logits: decoding and drafted ones
    prompt_rows: int | IntArray = 0  # without
    work: float | FloatArray = 0.0  # sum over rows of the positions that each attends to


class StepCost:
    """Seconds of a step by its shape.

    knots [K] ascending row counts, seconds [K] what they cost with short contexts; prompt_row
    and position are the seconds that a prompt row, and a position that a row attends to, add.
    """

    def __init__(
        self, knots: IntArray, seconds: FloatArray, prompt_row: float, position: float
    ) -> None:
        assert len(knots) == len(seconds) > 1
        self._knots, self._places = knots.astype(np.float64), np.arange(len(knots))
        self._seconds = np.maximum.accumulate(seconds)
        self._prompt_row, self._position = prompt_row, position
        self._factor = 1.0

    def seconds(self, shape: Shape) -> FloatArray:
        """What steps of these shapes are expected to take. [N], or a scalar array"""
        rows = np.asarray(shape.rows, np.float64)
        knots, table = self._knots, self._seconds
        inside = np.interp(rows, knots, table)
        slope = (table[-1] - table[-2]) / (knots[-1] - knots[-2])
        beyond = np.maximum(0.0, rows - knots[-1]) * slope
        others = np.multiply(shape.prompt_rows, self._prompt_row)
        others = others + np.multiply(shape.work, self._position)
        total: FloatArray = (inside + beyond + others) * self._factor
        return total

    def prompt_rows_within(self, seconds: float, position: int) -> int:
        """How many rows of a prompt, from a position on, fit into so many seconds."""
        each = (self._prompt_row + position * self._position) * self._factor
        return int(seconds / each) if each > 0 else 1 << 30

    def observe(self, shape: Shape, seconds: float) -> None:
        """Learn from a step that has been run."""
        surprise = math.log(min(max(seconds / float(self.seconds(shape)), 0.5), 2.0))
        self._factor *= math.exp(_FACTOR_RATE * surprise)
        if shape.prompt_rows:
            return
        place = float(np.interp(float(shape.rows), self._knots, self._places))
        table, below = self._seconds.copy(), int(place)
        for knot, nearness in ((below, below + 1 - place), (below + 1, place - below)):
            if nearness:
                table[knot] *= math.exp(_SHAPE_RATE * surprise * nearness)
        self._seconds = np.maximum.accumulate(table)
