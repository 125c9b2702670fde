"""Weights in bfloat16, int8 and int4: step times and perplexity. `make bench-weights`.

The packaged model in the native step, in this process, on all its cores; the formats take turns.
Perplexity is over the licence and the project's own pages, which are at hand everywhere.
"""

from __future__ import annotations

import math
import os
import time
from functools import partial
from pathlib import Path

from common.config import ModelConfig, prepare_process

QUANTIZATIONS = ("none", "int8", "int4")
TEXTS = ("LICENSE", "README.md", "common/README.md")
NUM_TOKENS, CHUNK = 2000, 250
POINTS = ((1, 1), (1, 8), (16, 1), (32, 1))  # sequences, rows of each
CONTEXT, NUM_ROUNDS = 100, 15


def main() -> None:
    prepare_process("")
    import torch  # after the above: reads its threads when it is loaded

    from common.engine.batch import Span, pack
    from common.engine.block_manager import BlockManager
    from common.engine.loader import LoadedModel, load
    from tests.benchmarks.harness import Row, interleave, ratios, report, spread
    from tests.benchmarks.prompts import speaker

    threads = len(os.sched_getaffinity(0))
    models = {
        name: load(ModelConfig(quantization=name, num_kv_tokens=8192, threads=threads))
        for name in QUANTIZATIONS
    }

    def perplexity(loaded: LoadedModel, ids: list[int]) -> float:
        blocks, total = BlockManager(loaded.num_blocks, loaded.info.block_size), 0.0
        blocks.open(0)
        blocks.reserve(0, len(ids))
        for at in range(0, len(ids), CHUNK):
            piece, following = ids[at : at + CHUNK], ids[at + 1 : at + 1 + CHUNK]
            batch = pack([Span(0, at, piece, len(piece))], blocks, "cpu")
            log_p = torch.log_softmax(loaded.model.forward(batch).logits, dim=-1)
            total += float(log_p[range(len(following)), following].double().sum())
        return math.exp(-total / (len(ids) - 1))

    def milliseconds(loaded: LoadedModel, sequences: int, rows: int) -> float:
        blocks = BlockManager(loaded.num_blocks, loaded.info.block_size)
        for sid in range(sequences):
            blocks.open(sid)
            blocks.reserve(sid, CONTEXT + rows)
        spans = [Span(sid, CONTEXT, [5] * rows, rows) for sid in range(sequences)]
        batch = pack(spans, blocks, "cpu")
        loaded.model.forward(batch)
        began = time.perf_counter()
        loaded.model.forward(batch)
        return (time.perf_counter() - began) * 1e3

    found: list[Row] = []
    for path in TEXTS:
        ids = list(speaker().encode(Path(path).read_text()))[:NUM_TOKENS]
        told = ", ".join(f"{name} {perplexity(m, ids):.3f}" for name, m in models.items())
        found.append(Row(f"perplexity of {len(ids)} tokens of {path}", told))
    for sequences, rows in POINTS:
        contenders = {
            name: partial(milliseconds, loaded, sequences, rows) for name, loaded in models.items()
        }
        times = interleave(contenders, NUM_ROUNDS)
        for name in QUANTIZATIONS[1:]:
            faster = spread(ratios(times["none"], times[name]))
            what = f"{sequences:2} x {rows} rows, bfloat16 / {name}"
            value = f"{spread(times['none'], '.1f')} / {spread(times[name], '.1f')} ms: {faster}x"
            found.append(Row(what, value))
    report("bench-weights", found)


if __name__ == "__main__":
    main()
