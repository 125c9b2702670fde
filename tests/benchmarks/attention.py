"""Attention alone: bytes of keys and values a second, against a plain read of as many.

One query row each of many sequences, in the shape of SmolLM2-135M. Plain reading, the native
attention, the reference and the native step's own attention take turns over the same number of
layers, so that caches and neighbours treat them alike. `python -m tests.benchmarks.attention`.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from common.config import ModelConfig, prepare_process
from common.engine.attention import AttentionBackend, CacheSpec, KVShape
from common.engine.attention.cpu import CpuAttention
from common.engine.attention.reference import ReferenceAttention
from common.engine.batch import RaggedBatch, Span, pack
from common.engine.block_manager import BlockManager
from common.engine.native import NativeModel, UnsupportedError
from common.engine.native.build import attention_library
from tests.benchmarks.harness import Row, bounded, interleave, ratios, report, spread

NUM_HEADS, NUM_KV_HEADS, DIM, BLOCK_SIZE = 9, 3, 64, 16
SHARE_OF_BANDWIDTH = 0.5
CACHE_DIR = ModelConfig().cache_dir


@dataclass(frozen=True)
class Setting:
    """How much is attended to."""

    num_sequences: int = 16
    context_len: int = 2000
    num_rows: int = 1  # of each sequence
    num_layers: int = 8
    num_threads: int = 2
    num_rounds: int = 15
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_blocks(self) -> int:
        """Blocks of all sequences."""
        return self.num_sequences * -(-self.context_len // BLOCK_SIZE)

    @property
    def num_bytes(self) -> int:
        """Keys and values of one layer that have to be read once."""
        per_token = NUM_KV_HEADS * 2 * DIM * self.dtype.itemsize
        return self.num_sequences * self.context_len * per_token


def measure(setting: Setting) -> dict[str, list[float]]:
    """Seconds a layer of each contender, in interleaved rounds; "read" is plain reading."""
    torch.set_num_threads(setting.num_threads)
    library, reason = attention_library(CACHE_DIR)
    if library is None:
        raise SystemExit(f"no native attention here: {reason}")
    layer = KVShape(NUM_KV_HEADS, DIM, DIM)
    spec = CacheSpec(
        (layer,) * setting.num_layers, setting.num_blocks, BLOCK_SIZE, setting.dtype,
        torch.device("cpu"),
    )  # fmt: skip
    batch = _batch(setting, setting.context_len)
    ours = CpuAttention(spec, library, setting.num_threads)
    contenders: dict[str, Callable[[], float]] = {
        "read": _reader(library, setting),
        "cpu": _attender(ours, batch, setting),
        "reference": _attender(ReferenceAttention(spec), batch, setting),
    }
    for attend in contenders.values():
        attend()  # memory is there, threads are up
    return interleave(contenders, setting.num_rounds) | _native_step(setting, batch)


def figures(setting: Setting, found: dict[str, list[float]]) -> list[Row]:
    """Rows of the report: bandwidths, the share of plain reading, and times."""
    what = f"{setting.num_sequences} x {setting.context_len:,} tokens, {setting.num_rows} row each"
    rows = []
    for name, seconds in found.items():
        speeds = [setting.num_bytes / s / 1e9 for s in seconds]
        milliseconds = statistics.median(seconds) * 1e3
        rows.append(Row(f"{name}: {what}", f"{spread(speeds, '.1f')} GB/s, {milliseconds:.2f} ms"))
    share = statistics.median(ratios(found["read"], found["cpu"]))
    if setting == Setting(num_threads=setting.num_threads, num_rounds=setting.num_rounds):
        rows.append(bounded("share of the read bandwidth", share, ">=", SHARE_OF_BANDWIDTH))
    else:
        rows.append(Row("share of the read bandwidth", f"{share:.2f}"))
    faster = statistics.median(ratios(found["reference"], found["cpu"]))
    return [*rows, Row("times as fast as the reference", f"{faster:.1f}")]


def _batch(setting: Setting, context_len: int) -> RaggedBatch:
    """The last rows of sequences whose blocks lie anywhere."""
    blocks = BlockManager(setting.num_blocks, BLOCK_SIZE)
    random.Random(0).shuffle(blocks._free)
    spans = []
    for sid in range(setting.num_sequences):
        blocks.open(sid)
        assert blocks.reserve(sid, context_len)
        num = setting.num_rows
        spans.append(Span(sid, context_len - num, [0] * num, num))
    return pack(spans, blocks, "cpu")


def _reader(library: ctypes.CDLL, setting: Setting) -> Callable[[], float]:
    """Reads as many bytes as all layers have, of memory as the cache's."""
    library.tandem_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    library.tandem_read.restype = ctypes.c_uint64
    num_bytes = setting.num_bytes * setting.num_layers
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    library.tandem_advise(memory.data_ptr(), num_bytes)  # `CpuAttention` has set its types
    memory.fill_(1)

    def read() -> float:
        start = time.perf_counter()
        library.tandem_read(memory.data_ptr(), num_bytes, setting.num_threads)
        return (time.perf_counter() - start) / setting.num_layers

    return read


def _attender(
    backend: AttentionBackend, batch: RaggedBatch, setting: Setting
) -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    shape = (setting.num_sequences * setting.num_rows, NUM_HEADS + 2 * NUM_KV_HEADS, DIM)
    rows = torch.randn(shape, generator=generator).to(setting.dtype)
    q, k, v = rows.tensor_split([NUM_HEADS, NUM_HEADS + NUM_KV_HEADS], 1)

    def attend() -> float:
        start = time.perf_counter()
        for layer in range(setting.num_layers):
            backend.attend(
                layer, q, k, v, batch, scale=DIM**-0.5, sliding_window=None, softcap=None
            )
        return (time.perf_counter() - start) / setting.num_layers

    return attend


def _native_step(setting: Setting, batch: RaggedBatch) -> dict[str, list[float]]:
    """The native step's own: a step over the contexts minus one over hardly any."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=NUM_HEADS * DIM, intermediate_size=64,
        num_hidden_layers=setting.num_layers, num_attention_heads=NUM_HEADS,
        num_key_value_heads=NUM_KV_HEADS, head_dim=DIM, max_position_embeddings=8192,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    try:
        native = NativeModel(
            model, windows=[0] * setting.num_layers, num_blocks=setting.num_blocks,
            block_size=BLOCK_SIZE, num_threads=setting.num_threads, cache_dir=CACHE_DIR,
        )  # fmt: skip
    except UnsupportedError:
        return {}

    def step(batch: RaggedBatch) -> float:
        start = time.perf_counter()
        native.forward(batch)
        return (time.perf_counter() - start) / setting.num_layers

    short = _batch(setting, setting.num_rows)
    step(batch)
    turns = interleave(
        {"long": lambda: step(batch), "short": lambda: step(short)}, setting.num_rounds
    )
    floor = statistics.median(turns["short"])
    return {"native step": [max(s - floor, 1e-9) for s in turns["long"]]}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    for field in dataclasses.fields(Setting):
        if isinstance(field.default, int):
            flag = "--" + field.name.replace("_", "-")
            parser.add_argument(flag, type=int, default=field.default)
    asked = vars(parser.parse_args())
    prepare_process("", asked["num_threads"])
    setting = Setting(**asked)
    report("bench-attention", figures(setting, measure(setting)))


if __name__ == "__main__":
    main()
