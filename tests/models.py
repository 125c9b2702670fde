"""Small models: transformers of a few thousand weights, and tables in place of models."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
)

from common.config import ModelConfig
from common.engine.batch import Output, RaggedBatch
from common.engine.loader import build
from common.engine.paged_model import PagedModel

VOCAB = 61
CONTEXT = 256
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**_SHAPE),
    "qwen3": Qwen3Config(**_SHAPE),
    "gpt2": GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=CONTEXT,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
    ),
}
# Softcap and sliding window, in every other layer; both small enough to matter in 30 tokens.
GEMMA2 = Gemma2Config(
    **_SHAPE,
    query_pre_attn_scalar=8,
    sliding_window=5,
    attn_logit_softcapping=0.8,
    final_logit_softcapping=5.0,
)


def transformer(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """An untrained model, always the same; its logits are as uneven as a trained one's."""
    torch.manual_seed(7)
    config = GEMMA2 if family == "gemma2" else CONFIGS[family]
    attention = "eager" if family == "gemma2" else "sdpa"  # which knows no softcap
    model = AutoModelForCausalLM.from_config(
        deepcopy(config),
        dtype=dtype,
        attn_implementation=attention,  # a model keeps its config
    )
    return model.eval().requires_grad_(False)


@cache
def paged(family: str, instance: str = "target", num_kv_tokens: int = 2048) -> PagedModel:
    """The model over a cache of its own; one cache for each instance name.

    In float64 with the reference attention, or "gpt2 in float32" with the best there is.
    """
    config = ModelConfig(num_kv_tokens=num_kv_tokens, backend="torch")
    family, _, dtype = family.partition(" in ")
    model = build(transformer(family, getattr(torch, dtype or "float64")), config)[0]
    assert isinstance(model, PagedModel)
    return model


class TableModel:
    """Logits by position and last token: a model of order one, whose law is known."""

    context_len = 64
    device = torch.device("cpu")

    def __init__(self, table: Tensor) -> None:
        self.table = table  # [P, V, V] logits after a token at a position, position mod P
        self.vocab_size = table.shape[-1]

    def forward(self, batch: RaggedBatch) -> Output:
        rows = batch.logit_rows
        return Output(self.table[batch.positions[rows] % len(self.table), batch.token_ids[rows]])

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """There is no cache to copy in."""
