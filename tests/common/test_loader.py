"""What can't be served exactly is refused at start, with the field and the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    BloomConfig,
    BloomForCausalLM,
    GenerationConfig,
    GptOssConfig,
    LlamaConfig,
    MambaConfig,
    MambaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging as transformers_logging

from common.config import ModelConfig
from common.engine.batch import Output, RaggedBatch
from common.engine.loader import LoadedModel, build, load
from common.engine.noise import NOISE_VERSION
from common.engine.probe import is_row_invariant, paged_logits, probe, probe_tokens
from common.errors import ConfigurationError
from common.tokenizer import fingerprint
from tests.gateway.fakes import FILES
from tests.models import CONFIGS, CONTEXT, VOCAB, TableModel, transformer

transformers_logging.disable_progress_bar()
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32}


def _save(folder: Path, model: Any) -> Path:
    """A model folder with a tiny tokenizer in it."""
    model.save_pretrained(folder)
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return _save(tmp_path / "tiny", transformer("llama", torch.float32))


def _load(folder: Path | str, **settings: Any) -> LoadedModel:
    return load(ModelConfig(model=str(folder), num_kv_tokens=100, **settings))


def _refusal(folder: Path | str, **settings: Any) -> ConfigurationError:
    with pytest.raises(ConfigurationError) as caught:
        _load(folder, **settings)
    return caught.value


def test_a_folder_is_loaded_and_described(folder: Path) -> None:
    loaded = _load(folder)
    info = loaded.info
    assert (info.name, info.dtype, info.vocab_size) == ("tiny", "float32", VOCAB)
    assert (info.context_len, info.block_size, info.eos_token_ids) == (CONTEXT, 16, (1,))
    assert (info.noise_version, info.attention_backend) == (NOISE_VERSION, "cpu")
    assert info.tokenizer_fingerprint == fingerprint(FILES)
    assert isinstance(info.row_invariant, bool)
    assert loaded.tokenizer_files == FILES
    assert loaded.num_blocks == 7  # 100 tokens
    assert _load(folder, model_name="mine", block_size=4).info.name == "mine"
    assert load(ModelConfig(model=str(folder))).num_blocks == 4 * CONTEXT / 16


def test_the_loaded_model_is_the_saved_one(folder: Path) -> None:
    loaded = _load(folder, dtype="float64")
    expected = transformer("llama", torch.float32).double()(probe_tokens(VOCAB)[None]).logits[0]
    torch.testing.assert_close(paged_logits(loaded.model, 16), expected, rtol=0.0, atol=1e-12)


def test_several_eos_ids_come_from_the_generation_config(folder: Path) -> None:
    GenerationConfig(eos_token_id=[1, 5]).save_pretrained(folder)
    assert _load(folder).info.eos_token_ids == (1, 5)


def test_the_fingerprint_follows_dtype_and_weights(folder: Path, tmp_path: Path) -> None:
    first = _load(folder).info.weights_fingerprint
    assert _load(folder, model_name="other").info.weights_fingerprint == first
    changed = {_load(folder, dtype=d).info.weights_fingerprint for d in ("bfloat16", "float64")}
    model = transformer("llama", torch.float32)
    model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-6
    changed.add(_load(_save(tmp_path / "other", model)).info.weights_fingerprint)
    assert len(changed - {first}) == 3


# -- refusals --------------------------------------------------------------------------


def _llama_with(**changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(LlamaConfig(**(CONFIGS["llama"].to_dict() | changes)))


DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
UNSERVED: dict[str, tuple[Callable[[], Any], str]] = {
    "encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=VOCAB, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=8)
        ),
        "is an encoder-decoder model",
    ),
    "dynamic rope": (lambda: _llama_with(rope_parameters=DYNAMIC), "batch mates"),
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(**SMALL, n_layer=1, n_head=2)),
        "context length",
    ),
    "mamba": (
        lambda: MambaForCausalLM(MambaConfig(**SMALL, num_hidden_layers=1)),
        "context length",
    ),
    "attention in both directions": (
        lambda: BertLMHeadModel(
            BertConfig(
                **SMALL, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
                is_decoder=False, initializer_range=0.5,
            )
        ),
        "over the paged cache its logits differ",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", UNSERVED)
def test_models_that_can_t_be_served_exactly(kind: str, tmp_path: Path) -> None:
    make, reason = UNSERVED[kind]
    error = _refusal(_save(tmp_path / kind, make()))
    assert error.field == "--model"
    assert reason in error.message


def test_attention_that_can_t_be_replaced() -> None:
    """`from_config(attn_implementation=...)` takes such models without a word."""
    model = BloomForCausalLM(BloomConfig(**SMALL, n_layer=1, n_head=2))
    with pytest.raises(ConfigurationError, match="--model: BloomForCausalLM has no replaceable"):
        probe(model.eval())


def test_attention_with_an_argument_that_is_not_known() -> None:
    """gpt_oss gives its attention sinks (`s_aux`), which change the mathematics."""
    config = GptOssConfig(
        **SMALL,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(ConfigurationError, match=r"gives its attention [a-z_, ]*s_aux"):
        build(model, ModelConfig(num_kv_tokens=100))


# Files and what they hold instead; None: they are gone.
DAMAGE: dict[str, tuple[dict[str, str | None], str]] = {
    "no config": ({"config.json": None}, "tiny can't be read"),
    "a config that is no JSON": ({"config.json": "{"}, "tiny can't be read"),
    "an unknown kind of model": ({"config.json": '{"model_type": "x"}'}, "tiny can't be read"),
    "no weights": ({"model.safetensors": None}, "tiny can't be read"),
    "cut weights": ({"model.safetensors": "12345678"}, "tiny can't be read"),
    "no tokenizer": (dict.fromkeys(FILES), "the tokenizer of tiny can't be read"),
    "a tokenizer that is no JSON": ({"tokenizer.json": "{"}, "the tokenizer's files can't be read"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_folders_that_can_t_be_read(damage: str, folder: Path) -> None:
    files, reason = DAMAGE[damage]
    for name, content in files.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(content)
    assert reason in _refusal(folder).message


@pytest.mark.parametrize("name", ["./no/such/folder", "nobody/nothing-such", "no-such.gguf"])
def test_what_is_not_there(name: str) -> None:
    error = _refusal(name)
    assert error.field == "--model"
    assert name.removeprefix("./") in str(error)


def test_an_unknown_dtype(folder: Path) -> None:
    error = _refusal(folder, dtype="int8")
    assert (error.field, error.code.name) == ("--dtype", "FAILED_PRECONDITION")


# -- row invariance --------------------------------------------------------------------


class Neighbourly(TableModel):
    """A row's logits move in their last bit with the number of rows beside it."""

    def forward(self, batch: RaggedBatch) -> Output:
        off = 2.0**-52 * (len(batch.token_ids) > self.limit)
        return Output(super().forward(batch).logits * (1 + off))

    limit = 3


def test_row_invariance_is_told_honestly() -> None:
    table = torch.randn(4, VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator())
    assert is_row_invariant(TableModel(table), 16) is True
    assert is_row_invariant(Neighbourly(table), 16) is False
    Neighbourly.limit = 0  # alike for any number of rows
    assert is_row_invariant(Neighbourly(table), 16) is True
    Neighbourly.limit = 70  # beyond a short text
    assert is_row_invariant(Neighbourly(table), 16) is True
    assert is_row_invariant(Neighbourly(table), 16, 96) is False


def test_a_checkpoint_with_a_hole_is_refused(folder: Path) -> None:
    """transformers would fill it with random numbers."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    refusal = _refusal(folder)
    assert refusal.field == "--model"
    assert "tiny lacks weights: model.layers.1.mlp.up_proj.weight" in str(refusal)


def test_a_cache_too_small_to_probe_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        load(ModelConfig(model=str(folder), num_kv_tokens=8))
    assert caught.value.field == "--num-kv-tokens"


def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub() -> None:
    assert "there is no folder ./nothere" in str(_refusal("./nothere"))
