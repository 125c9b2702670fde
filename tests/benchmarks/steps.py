"""Forward passes of the packaged model, timed in a process of its own: `measure`.

Pinned and with the threads it is told, since OpenMP reads them when it is loaded. The cache is
filled before: memory that was never written reads faster than any cache.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import prepare_process

BLOCK_SIZE, FILL = 16, 512
MATRIX = 2048


@dataclass(frozen=True)
class Point:
    """A pass: so many sequences, each with so many rows that end its context."""

    sequences: int
    rows: int  # of each sequence
    context: int


@dataclass(frozen=True)
class Measured:
    """Times of passes, and what the machine can do at best."""

    seconds: dict[Point, list[float]]
    bytes_per_second: float  # of a plain read
    flops_per_second: float  # of a large bfloat16 product
    weight_bytes: int
    kv_bytes_per_token: int
    attention_flops: int  # of one row for each token of context

    def median(self, point: Point) -> float:
        """Seconds of a pass."""
        return statistics.median(self.seconds[point])

    def read_floor(self, point: Point) -> float:
        """Seconds to read all weights and every sequence's keys and values once."""
        kv = point.sequences * point.context * self.kv_bytes_per_token
        return (self.weight_bytes + kv) / self.bytes_per_second

    def compute_floor(self, point: Point) -> float:
        """Seconds of its products, if they all ran as fast as a large one. 2 bytes a weight."""
        rows = point.sequences * point.rows
        flops = rows * (self.weight_bytes + point.context * self.attention_flops)
        return flops / self.flops_per_second


def measure(points: Sequence[Point], rounds: int, cores: str, threads: int) -> Measured:
    """Time each point so many times, in turn, in a process on these cores."""
    job = {"points": [list(vars(p).values()) for p in points], "rounds": rounds}
    command = [sys.executable, "-m", "tests.benchmarks.steps", cores, str(threads)]
    done = subprocess.run(
        command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True
    )
    told = json.loads(done.stdout.splitlines()[-1])
    return Measured(dict(zip(points, told.pop("seconds"), strict=True)), **told)


def _work(points: list[Point], rounds: int, threads: int) -> dict[str, Any]:
    import torch

    from common.config import ModelConfig
    from common.engine.block_manager import BlockManager
    from common.engine.loader import load
    from tests.benchmarks.memory import reader

    most = max(p.sequences * (-(-p.context // BLOCK_SIZE)) for p in points)
    num_kv_tokens = max(most * BLOCK_SIZE, FILL)
    loaded = load(ModelConfig(dtype="bfloat16", threads=threads, num_kv_tokens=num_kv_tokens))
    blocks = BlockManager(loaded.num_blocks, BLOCK_SIZE, prefix_cache=False)
    fill(loaded.model, blocks)
    seconds: list[list[float]] = [[] for _ in points]
    read, product = list[float](), list[float]()
    read_rate = reader(threads)
    matrix = torch.ones(MATRIX, MATRIX, dtype=torch.bfloat16)
    for _ in range(rounds):
        for point, found in zip(points, seconds, strict=True):
            found.append(time_pass(loaded.model, blocks, point))
        read.append(read_rate())
        product.append(_timed(lambda: matrix @ matrix))
    return {"seconds": seconds} | {
        "bytes_per_second": max(read),
        "flops_per_second": 2 * MATRIX**3 / min(product),
    }


def fill(model: Any, blocks: Any) -> None:
    """Write every block: one prompt's, copied over all."""
    from common.engine.batch import Span, pack

    sid = 0
    blocks.open(sid)
    blocks.reserve(sid, FILL)
    model.forward(pack([Span(sid, 0, list(range(1000, 1000 + FILL)), 1)], blocks, model.device))
    table = [int(b) for b in blocks.table(sid)]
    others = [b for b in range(blocks.num_blocks) if b not in set(table)]
    model.copy_blocks([(table[i % len(table)], b) for i, b in enumerate(others)])
    blocks.free(sid)


def time_pass(model: Any, blocks: Any, point: Point) -> float:
    """The better of two passes, after one that warms up."""
    from common.engine.batch import Span, pack

    spans = []
    for sid in range(point.sequences):
        blocks.open(sid)
        assert blocks.reserve(sid, point.context), "the cache is too small"
        tokens = [1000 + sid + i for i in range(point.rows)]
        spans.append(Span(sid, point.context - point.rows, tokens, point.rows))
    batch = pack(spans, blocks, model.device)
    model.forward(batch)
    fastest = min(_timed(lambda: model.forward(batch)) for _ in range(2))
    for sid in range(point.sequences):
        blocks.free(sid)
    return fastest


def _timed(function: Callable[[], object]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def _shape() -> dict[str, int]:
    """Sizes of the packaged model, from its files."""
    from tests.integration.stacks import packaged_model

    folder = Path(packaged_model())
    config = json.loads((folder / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    per_layer = config["num_hidden_layers"] * head_dim
    return {
        "weight_bytes": (folder / "model.safetensors").stat().st_size,
        "kv_bytes_per_token": 2 * 2 * per_layer * config["num_key_value_heads"],
        "attention_flops": 4 * per_layer * config["num_attention_heads"],
    }


def main() -> None:
    cores, threads = sys.argv[1], int(sys.argv[2])
    prepare_process(cores, threads)
    job = json.load(sys.stdin)
    points = [Point(*p) for p in job["points"]]
    told = _work(points, job["rounds"], threads) | _shape()
    print(json.dumps(told))


if __name__ == "__main__":
    main()
