"""A transformers model over a paged KV cache: ragged batch in, logits out.

The model runs through its own modules; only its attention is replaced, through
transformers' attention interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from common.engine.attention import AttentionBackend
from common.engine.batch import Output, RaggedBatch

ATTENTION_NAME = "tandem_paged"


class LanguageModel(Protocol):
    """What an engine needs of a model; tests put tables in its place."""

    vocab_size: int
    context_len: int
    device: torch.device

    def forward(self, batch: RaggedBatch) -> Output:
        """Logits of the batch's R logit rows, which the caller may write into."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the KV cache (from, to), one after the other."""


@dataclass(frozen=True)
class _Call:
    """What travels through the model's modules to its attention layers."""

    backend: AttentionBackend
    batch: RaggedBatch


class PagedModel:
    """Runs ragged batches through a model that was loaded with `ATTENTION_NAME`."""

    def __init__(
        self, model: nn.Module, backend: AttentionBackend, vocab_size: int, context_len: int
    ) -> None:
        self._model = model
        self._backend = backend
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.device = next(model.parameters()).device
        self.backend = backend.name
        self.features: tuple[str, ...] = ()

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Output:
        """See `LanguageModel`."""
        logits: Tensor = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            tandem_call=_Call(self._backend, batch),
        ).logits
        return Output(logits[0])

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `LanguageModel`."""
        self._backend.copy_blocks(copies)


def _paged_attention(
    module: nn.Module,
    query: Tensor,  # [1, H, M, D]
    key: Tensor,  # [1, H_kv, M, D]
    value: Tensor,  # [1, H_kv, M, D_v]
    attention_mask: Tensor | None,
    *,
    tandem_call: _Call,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function as transformers calls it; the loader's probe vets the models."""
    layer: Any = module.layer_idx
    out = tandem_call.backend.attend(
        layer,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        tandem_call.batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        softcap=softcap,
    )
    return out.unsqueeze(0), None  # [1, M, H, D_v]


AttentionInterface.register(ATTENTION_NAME, _paged_attention)
