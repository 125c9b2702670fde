"""What a device allows: blocks, memory, and refusals that name the flag; GPUs are imitated."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common.config import ModelConfig
from common.engine.attention import CacheSpec, KVShape
from common.engine.device import check_device, num_kv_blocks, settled
from common.errors import ConfigurationError

GIB = 1 << 30


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    capability = {None: (9, 0), 0: (9, 0), 1: (7, 5)}
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: capability[d.index])


def _refusal(**settings: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        settled(ModelConfig(**settings))
    return str(caught.value)


@pytest.mark.parametrize("name", ["tpu-9", "mps", "meta", "cuda:x", ""])
def test_no_devices(name: str) -> None:
    assert _refusal(device=name) == f'--device: is "{name}", must be cpu, cuda or cuda:N'


def test_a_torch_without_gpus_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert _refusal(device="cuda").endswith(f"but torch {torch.__version__} is a build for CPUs")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert _refusal(device="cuda").endswith("finds no GPU")


@pytest.mark.usefixtures("two_gpus")
def test_gpus_that_are_there_and_new_enough() -> None:
    assert check_device("cuda").type == "cuda"
    assert check_device("cuda:0").index == 0
    assert _refusal(device="cuda:2") == '--device: is "cuda:2", but there are 2 GPUs'
    assert "of compute capability 7.5; attention needs 8.0" in _refusal(device="cuda:1")


@pytest.mark.usefixtures("two_gpus")
def test_block_sizes() -> None:
    assert settled(ModelConfig()).block_size == 16
    assert settled(ModelConfig(block_size=4)).block_size == 4
    assert settled(ModelConfig(device="cuda")).block_size == 256
    assert settled(ModelConfig(device="cuda", block_size=512)).block_size == 512
    assert _refusal(device="cuda", block_size=16) == (
        "--block-size: is 16, must be a multiple of 256 on CUDA, or 0 for the device's own"
    )
    assert _refusal(block_size=-1).startswith("--block-size: is -1, must be 1 or more")
    once = settled(ModelConfig(device="cuda"))
    assert settled(once) == once


@pytest.mark.parametrize("part", [0.0, -0.1, 1.1, float("nan")])
def test_parts_of_a_gpu(part: float) -> None:
    assert _refusal(gpu_memory_utilization=part).startswith("--gpu-memory-utilization: is ")


def _spec(device: str) -> CacheSpec:
    layers = (KVShape(8, 128, 128),) * 4
    return CacheSpec(layers, 0, 256, torch.bfloat16, torch.device(device))


def _blocks(device: str, free: int, **settings: Any) -> int:
    config = ModelConfig(block_size=256, **settings)
    return num_kv_blocks(config, _spec(device), 1000, lambda _: (free, 80 * GIB))


def test_memory_becomes_blocks() -> None:
    per_block = 4 * 8 * 256 * 256 * 2
    assert _spec("cuda").bytes_per_block == per_block == 4 << 20
    # 60 GiB free of 80: 8 stay free, a block is for padding.
    assert _blocks("cuda", 60 * GIB) == 52 * 256 - 1
    assert _blocks("cuda", 60 * GIB, gpu_memory_utilization=0.5) == 20 * 256 - 1
    assert _blocks("cuda", 60 * GIB, num_kv_tokens=1000) == 4
    assert _blocks("cpu", 0) == 16  # four contexts of 1,000
    assert _blocks("cpu", 0, num_kv_tokens=513) == 3


@pytest.mark.parametrize("free", [0, 8 * GIB, 8 * GIB + (4 << 20)])
def test_too_little_memory_is_refused(free: int) -> None:
    """Nothing is left, or just the padding's block."""
    with pytest.raises(ConfigurationError) as caught:
        _blocks("cuda", free)
    assert str(caught.value) == (
        "--gpu-memory-utilization: leaves 0 tokens of KV cache, must be 24 or more"
    )
    assert _blocks("cuda", 8 * GIB + (8 << 20)) == 1
