"""The first steps of a target, before it serves: they warm it up and find what steps cost."""

from __future__ import annotations

import time

import numpy as np

from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.paged_model import LanguageModel
from target_service.cost import StepCost

NUM_PROMPT_ROWS = 256
"""Rows of the prompt chunk that is timed."""


def measure(model: LanguageModel, blocks: BlockManager, max_rows: int) -> StepCost:
    """Time steps on an empty cache, which they leave empty."""
    longest = min(max_rows, blocks.capacity, model.context_len - 1)
    few = min(64, longest)
    knots = np.unique([*(1 << np.arange(few.bit_length())), few])
    if len(knots) == 1:  # nothing to choose from, and nothing to compare with
        return StepCost(np.array([1, 2]), np.ones(2), 1.0, 0.0)
    seconds = np.array([_time(model, blocks, 0, int(n), int(n)) for n in knots])
    num = max(2, min(NUM_PROMPT_ROWS, longest))
    prompt_row = max(0.0, _time(model, blocks, 0, num, 1) - seconds[0]) / (num - 1)
    far = longest - few
    extra = _time(model, blocks, far, few, few) - seconds[-1]
    position = max(0.0, extra) / max(1, few * far)
    return StepCost(knots, seconds, prompt_row, position)


def _time(model: LanguageModel, blocks: BlockManager, start: int, num: int, logits: int) -> float:
    """The better of two passes over num rows from a position on, in seconds."""
    sid = -1
    blocks.open(sid)
    try:
        blocks.reserve(sid, start + num)
        batch = pack([Span(sid, start, [0] * num, logits)], blocks, model.device)
        times = []
        for _ in range(2):
            began = time.perf_counter()
            model.forward(batch).logits.max().item()  # waits for the device
            times.append(time.perf_counter() - began)
        return min(times)
    finally:
        blocks.free(sid)
