"""The script for a GPU, on imitations: a GPU's time is too dear to find out that it breaks."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from common.engine.attention import CacheSpec
from common.engine.attention.cuda import CudaAttention
from common.engine.cuda_model import GraphedModel
from common.engine.paged_model import PagedModel
from tests.benchmarks import gpu
from tests.cuda_fakes import FakeCapture, cuda_like, varlen_attn
from tests.models import transformer

ROOT = Path(__file__).parents[2]


def _served(model: Any, *, cuda_graphs: bool) -> PagedModel | GraphedModel:
    model.set_attn_implementation("sdpa")
    capture = FakeCapture() if cuda_graphs else None
    return cuda_like(model, num_blocks=100, block_size=gpu.BLOCK, capture=capture)[0]


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> gpu.Findings:
    def attention(spec: CacheSpec, softcaps: list[float | None]) -> CudaAttention:
        return CudaAttention(spec, softcaps, varlen_attn)

    monkeypatch.setattr(gpu, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(gpu, "BUILD", tmp_path)
    monkeypatch.setattr(gpu, "NUM_KV_TOKENS", 100 * gpu.BLOCK)
    monkeypatch.setattr(gpu, "CudaAttention", attention)
    monkeypatch.setattr(gpu, "passes", partial(gpu.passes, 1))
    monkeypatch.setattr(gpu, "served", _served)
    monkeypatch.setattr(gpu, "CONTEXT", 100)
    monkeypatch.setattr(gpu, "RANDOM", LlamaConfig(vocab_size=200))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return gpu.Findings()


def test_every_part_runs_and_finds_the_imitations_right(imitated: gpu.Findings) -> None:
    found = imitated
    gpu.attention(found)
    gpu.deciding(found)
    gpu.graphs(found, transformer("llama"))
    gpu.identity(found, transformer("llama"))
    assert len(found.rows) > 20
    assert [r.what for r in found.rows if r.holds is False] == []
    assert found.figures["identical answers"] == 1.0
    found.write()


def test_step_times_of_both_ways(imitated: gpu.Findings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "ROWS", (1, 4))
    gpu.step_times(imitated, transformer("llama"))
    assert len(imitated.figures) == 8
    assert all(ms > 0 for ms in imitated.figures.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_ends_with_one_line(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    done = subprocess.run(
        [ROOT / "tests/benchmarks/gpu.sh"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith('gpu: nothing was measured: --device: is "cuda", but torch ')
    assert not (tmp_path / "out").exists()
