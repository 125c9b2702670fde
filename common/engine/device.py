"""What depends on where a model runs: whether it can, block size, size of the KV cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from common.config import ModelConfig
from common.engine.attention import CacheSpec
from common.engine.attention.cuda import MIN_CAPABILITY, PAGE_MULTIPLE
from common.engine.probe import NUM_TOKENS
from common.errors import ConfigurationError

CPU_BLOCK_SIZE = 16
NUM_KV_CONTEXTS = 4
"""Whole contexts that the KV cache holds by default, where memory is the machine's."""


def settled(config: ModelConfig) -> ModelConfig:
    """The same configuration with a block size that its device can have.

    Raises `ConfigurationError` for a device that is not there or a size that does not fit it.
    """
    on_gpu = check_device(config.device).type == "cuda"
    if not 0 < config.gpu_memory_utilization <= 1:
        raise ConfigurationError(
            f"is {config.gpu_memory_utilization}, must be above 0 and at most 1",
            field="--gpu-memory-utilization",
        )
    if config.block_size == 0:
        return replace(config, block_size=PAGE_MULTIPLE if on_gpu else CPU_BLOCK_SIZE)
    if config.block_size < 0 or (on_gpu and config.block_size % PAGE_MULTIPLE):
        must = f"a multiple of {PAGE_MULTIPLE} on CUDA" if on_gpu else "1 or more"
        raise ConfigurationError(
            f"is {config.block_size}, must be {must}, or 0 for the device's own",
            field="--block-size",
        )
    return config


def check_device(name: str) -> torch.device:
    """The device of that name; raises `ConfigurationError` if models can't run there."""

    def refusal(reason: str) -> ConfigurationError:
        return ConfigurationError(f'is "{name}", {reason}', field="--device")

    try:
        device = torch.device(name)
    except RuntimeError:
        raise refusal("must be cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise refusal("must be cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        built = "finds no GPU" if torch.version.cuda else "is a build for CPUs"
        raise refusal(f"but torch {torch.__version__} {built}")
    if (device.index or 0) >= torch.cuda.device_count():
        raise refusal(f"but there are {torch.cuda.device_count()} GPUs")
    if (found := torch.cuda.get_device_capability(device)) < MIN_CAPABILITY:
        needed = ".".join(map(str, MIN_CAPABILITY))
        raise refusal(f"of compute capability {found[0]}.{found[1]}; attention needs {needed}")
    return device


def num_kv_blocks(
    config: ModelConfig,
    spec: CacheSpec,
    context_len: int,
    memory: Callable[[torch.device], tuple[int, int]] = torch.cuda.mem_get_info,
) -> int:
    """Blocks of the KV cache: as asked for, else by context on CPU and by memory on CUDA.

    spec: sizes; its own number of blocks is not looked at. memory: free and total bytes of a
    GPU, once the weights are there. Raises `ConfigurationError` if it is too small for the probe.
    """
    field = "--num-kv-tokens"
    if config.num_kv_tokens or spec.device.type != "cuda":
        num_tokens = config.num_kv_tokens or NUM_KV_CONTEXTS * context_len
        num_blocks = -(-num_tokens // config.block_size)
    else:
        free, total = memory(spec.device)
        spare = free - round(total * (1 - config.gpu_memory_utilization))
        num_blocks = max(0, spare) // spec.bytes_per_block - 1  # one is padding's
        num_tokens, field = max(0, num_blocks) * config.block_size, "--gpu-memory-utilization"
    if num_blocks * config.block_size < NUM_TOKENS:
        asked = field == "--num-kv-tokens"
        told = f"is {num_tokens}" if asked else f"leaves {num_tokens} tokens of KV cache"
        raise ConfigurationError(f"{told}, must be {NUM_TOKENS} or more", field=field)
    return num_blocks
