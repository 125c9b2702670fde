"""The rows of one forward pass, packed without padding, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from common.engine.block_manager import BlockManager
from common.types import IntArray


@dataclass(frozen=True)
class Span:
    """The rows of one sequence: consecutive tokens whose slots are reserved."""

    sid: int
    start: int  # absolute position of the first row
    token_ids: Sequence[int]
    num_logits: int  # how many of the last rows need logits


@dataclass(frozen=True)
class RaggedBatch:
    """M rows of S sequences, R of which need logits. Index arrays are int64."""

    token_ids: Tensor  # [M]
    positions: Tensor  # [M] absolute
    slots: Tensor  # [M] where a row's keys and values go
    query_start: IntArray  # [S + 1] first row of each sequence
    context_len: IntArray  # [S] tokens a sequence has in the cache after this pass
    block_table: Tensor  # [S, B] physical blocks, padded with 0
    logit_rows: Tensor  # [R]
    block_size: int

    @property
    def num_sequences(self) -> int:
        """S."""
        return len(self.context_len)

    @cached_property
    def context_slots(self) -> list[Tensor]:
        """Every slot of every sequence, in order of position. S times [context_len]"""
        within = torch.arange(self.block_size, device=self.block_table.device)
        slots = (self.block_table.unsqueeze(2) * self.block_size + within).flatten(1)
        return [slots[s, : int(n)] for s, n in enumerate(self.context_len)]


@dataclass(frozen=True)
class Output:
    """What a pass says of a batch's R logit rows."""

    logits: Tensor  # [R, V]
    likeliest: Tensor | None = None  # [R] as `Noise.likeliest`, if the pass found it on its way


def pack(spans: Sequence[Span], blocks: BlockManager, device: torch.device | str) -> RaggedBatch:
    """Pack spans, each of which ends with its sequence's last slot."""
    on_cpu = torch.device(device).type == "cpu"
    lengths = np.array([len(s.token_ids) for s in spans], np.int64)
    starts = np.array([s.start for s in spans], np.int64)
    stops = starts + lengths
    query_start = np.concatenate([[0], np.cumsum(lengths)])
    tables = [blocks.table(s.sid) for s in spans]
    block_table = np.zeros((len(spans), max(map(len, tables))), np.int64)
    for row, table in zip(block_table, tables, strict=True):
        row[: len(table)] = table
    # Position of every row, and with it block and slot, for all sequences at once.
    owner = np.repeat(np.arange(len(spans)), lengths)
    positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, lengths)
    slots = block_table[owner, positions // blocks.block_size] * blocks.block_size
    slots += positions % blocks.block_size
    num_logits = np.array([s.num_logits for s in spans], np.int64)
    logit_rows = np.flatnonzero(positions >= (stops - num_logits)[owner])

    def tensor(array: IntArray) -> Tensor:
        # torch lets go of the GIL in nearly all it does, and gets it back when others are done.
        return torch.from_numpy(array) if on_cpu else torch.from_numpy(array).to(device)

    return RaggedBatch(
        token_ids=tensor(np.array([t for s in spans for t in s.token_ids], np.int64)),
        positions=tensor(positions),
        slots=tensor(slots),
        query_start=query_start,
        context_len=stops,
        block_table=tensor(block_table),
        logit_rows=tensor(logit_rows),
        block_size=blocks.block_size,
    )
