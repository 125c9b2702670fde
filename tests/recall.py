"""A model that reads its own cache.

`RecallModel` keeps token ids where others keep keys and values, and what it says next is a
function of all of them: a slot that was not filled, not rolled back, or that somebody else has
written changes its text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from common.engine.batch import Output, RaggedBatch

VOCAB, CONTEXT, BLOCK = 50, 40, 4


def say(tokens: Sequence[int]) -> int:
    """What follows a text."""
    return sum((i + 1) * (t + 3) for i, t in enumerate(tokens)) % VOCAB


def go_on(tokens: Sequence[int], num: int) -> list[int]:
    """A text's next tokens."""
    text = list(tokens)
    for _ in range(num):
        text.append(say(text))
    return text[len(tokens) :]


class RecallModel:
    """Says what `say` says of the tokens in the cache; remembers the size of its passes."""

    vocab_size, device = VOCAB, torch.device("cpu")

    def __init__(self, num_slots: int, context_len: int = CONTEXT) -> None:
        self.context_len = context_len
        self._cache = torch.full((num_slots,), -1)
        self.rows: list[int] = []
        self.copies: list[tuple[int, int]] = []

    def forward(self, batch: RaggedBatch) -> Output:
        self.rows.append(len(batch.token_ids))
        self._cache[batch.slots] = batch.token_ids
        owner = np.searchsorted(batch.query_start, batch.logit_rows.numpy(), side="right") - 1
        logits = torch.zeros(len(owner), VOCAB)
        for row, s, position in zip(
            logits, owner, batch.positions[batch.logit_rows].tolist(), strict=True
        ):
            row[say(self._cache[batch.context_slots[s][: position + 1]].tolist())] = 9.0
        return Output(logits)

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        blocks = self._cache.view(-1, BLOCK)
        for source, target in copies:
            blocks[target] = blocks[source]
        self.copies += copies
