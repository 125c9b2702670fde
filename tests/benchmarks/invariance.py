"""Passes with and without row invariance, in turn in one process: `python -m` prints JSON.

In one process, since two that run the very same code differ by more than what is looked for.
"""

from __future__ import annotations

import json
import sys

from common.config import prepare_process
from tests.benchmarks.steps import BLOCK_SIZE, Point

POINTS = (Point(1, 1, 100), Point(16, 1, 100))


def main() -> None:
    cores, threads, rounds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    prepare_process(cores, threads)
    from common.config import ModelConfig
    from common.engine.block_manager import BlockManager
    from common.engine.loader import load
    from tests.benchmarks.steps import fill, time_pass

    models = []
    for any_batch in (False, True):
        config = ModelConfig(
            dtype="bfloat16", threads=threads, num_kv_tokens=4096, allow_batch_dependent=any_batch
        )
        loaded = load(config)
        blocks = BlockManager(loaded.num_blocks, BLOCK_SIZE, prefix_cache=False)
        fill(loaded.model, blocks)
        models.append((loaded.model, blocks))
    seconds: list[list[list[float]]] = [[[], []] for _ in POINTS]
    for _ in range(rounds):
        for point, found in zip(POINTS, seconds, strict=True):
            for (model, blocks), times in zip(models, found, strict=True):
                times.append(time_pass(model, blocks, point))
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
