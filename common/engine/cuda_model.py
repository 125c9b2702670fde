"""Decoding and verifying passes replayed from captured CUDA graphs.

On a GPU most of a small pass is the time to launch its kernels one by one; a graph launches all
of them at once. A graph has fixed shapes and addresses: rows are padded to the next of some
numbers, and whatever changes from pass to pass is copied into one fixed tensor first. A padding
row is a sequence of its own, one token long, in a block that no other sequence has; so no row
sees another row's padding. Passes that read prompts run as they are.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from common.engine.attention.cuda import CudaAttention, IndexedBatch, VarlenIndex
from common.engine.batch import Output, RaggedBatch
from common.engine.paged_model import PagedModel

log = logging.getLogger(__name__)

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Capture(Protocol):
    """Records what `run` does on fixed tensors; `CudaCapture`, or a test's imitation."""

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """What does the same again, into the same tensor, which it returns."""


class CudaCapture:
    """Captures into CUDA graphs that share their memory: only the last replay's output holds."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None  # torch's handle of the memory that all graphs share

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """See `Capture`."""
        with torch.cuda.device(self._device):
            aside: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                run()  # what libraries set up at their first call must not be captured
            torch.cuda.current_stream().wait_stream(aside)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                out = run()
            self._pool = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return out

        return replay


@dataclass(frozen=True)
class GraphShape:
    """Sizes of one graph."""

    num_rows: int
    single: bool  # no sequence has more than one row
    table_width: int
    block_size: int
    scratch_block: int


class Graph:
    """One captured pass of a fixed number of rows, in at most as many sequences."""

    def __init__(self, model: PagedModel, shape: GraphShape, capture: Capture) -> None:
        self._shape = shape
        n = shape.num_rows
        parts = {"token_ids": n, "positions": n, "slots": n}
        parts |= {"query_start": n + 1, "context_len": n, "block_table": n * shape.table_width}
        self._host = np.zeros(sum(parts.values()), np.int32)
        ends = np.cumsum(list(parts.values()))
        self._parts = dict(zip(parts, np.split(self._host, ends[:-1]), strict=True))
        self._parts["block_table"] = self._parts["block_table"].reshape(n, shape.table_width)
        self._pad(0, 0)
        self._fixed = torch.from_numpy(self._host).to(model.device, copy=True)
        fixed = dict(zip(parts, torch.split(self._fixed, list(parts.values())), strict=True))
        table = fixed["block_table"].view(n, shape.table_width)
        most = shape.table_width * shape.block_size
        index = VarlenIndex(
            query_start=fixed["query_start"],
            context_start=torch.arange(n + 1, dtype=torch.int32, device=model.device) * most,
            context_len=fixed["context_len"],
            block_table=table,
            max_rows=1 if shape.single else n,
            max_context=most,
        )
        every_row = torch.arange(n, device=model.device)

        def run() -> Tensor:
            batch = IndexedBatch(
                token_ids=fixed["token_ids"].long(),
                positions=fixed["positions"].long(),
                slots=fixed["slots"].long(),
                query_start=np.arange(n + 1),
                context_len=np.ones(n, np.int64),
                block_table=table,
                logit_rows=every_row,
                block_size=shape.block_size,
                index=index,
            )
            return model.forward(batch).logits

        self._replay = capture(run)

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Logits of the batch's logit rows, in a tensor of their own. [R, V]"""
        parts, m, s = self._parts, len(batch.token_ids), batch.num_sequences
        self._pad(m, s)
        for name, rows in (
            ("token_ids", batch.token_ids),
            ("positions", batch.positions),
            ("slots", batch.slots),
        ):
            parts[name][:m] = rows.numpy()
        parts["query_start"][: s + 1] = batch.query_start
        parts["context_len"][:s] = batch.context_len
        parts["block_table"][:s, : batch.block_table.shape[1]] = batch.block_table.numpy()
        self._fixed.copy_(torch.from_numpy(self._host))
        logits = self._replay()
        return logits[batch.logit_rows.to(logits.device)]

    def _pad(self, num_rows: int, num_sequences: int) -> None:
        """Make all but the first rows and sequences padding: one row each, then none."""
        shape, parts = self._shape, self._parts
        for name in ("token_ids", "positions"):
            parts[name][num_rows:] = 0
        parts["slots"][num_rows:] = shape.scratch_block * shape.block_size
        after = np.arange(num_rows, num_rows + shape.num_rows + 1 - num_sequences)
        parts["query_start"][num_sequences:] = np.minimum(after, shape.num_rows)
        parts["context_len"][num_sequences:] = 1
        parts["block_table"][:] = shape.scratch_block


class GraphedModel:
    """A `PagedModel` on a GPU whose small passes are graphs; captures them when it is made.

    Takes batches on the CPU: one copy brings what a pass needs. table_width: blocks of the
    longest sequence. row_buckets: ascending.
    """

    def __init__(
        self,
        model: PagedModel,
        capture: Capture,
        *,
        table_width: int,
        block_size: int,
        scratch_block: int,
        row_buckets: Sequence[int] = ROW_BUCKETS,
    ) -> None:
        self._model = model
        self.vocab_size, self.context_len = model.vocab_size, model.context_len
        self.device = torch.device("cpu")
        self.backend = model.backend
        self.features = (*model.features, "cuda-graphs")
        self._buckets = row_buckets
        self._graphs: dict[tuple[int, bool], Graph] = {}
        for num_rows in reversed(row_buckets):  # later ones find room in the memory of larger ones
            for single in (False, True) if num_rows > 1 else (True,):
                shape = GraphShape(num_rows, single, table_width, block_size, scratch_block)
                self._graphs[num_rows, single] = Graph(model, shape, capture)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch) -> Output:
        """See `LanguageModel`; logits are on the GPU."""
        if graph := self._graph_of(batch):
            return Output(graph(batch))
        return self._model.forward(_moved(batch, self._model.device))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `LanguageModel`."""
        self._model.copy_blocks(copies)

    def _graph_of(self, batch: RaggedBatch) -> Graph | None:
        """None: it has too many rows, or most need no logits, which a graph makes of all."""
        num_rows = len(batch.token_ids)
        if num_rows > self._buckets[-1] or 2 * len(batch.logit_rows) < num_rows:
            return None
        bucket = self._buckets[bisect_left(self._buckets, num_rows)]
        return self._graphs[bucket, num_rows == batch.num_sequences]


def captured(
    model: PagedModel,
    attention: CudaAttention,
    *,
    num_blocks: int,
    block_size: int,
    capture: Capture | None = None,
) -> PagedModel | GraphedModel:
    """The model with graphs, or as it is where it can't be captured; the log says why."""
    if any(attention.unknown):  # the reference looks at lengths on the host
        log.warning("runs without CUDA graphs: some layers go through reference attention")
        return model
    try:
        return GraphedModel(
            model,
            capture or CudaCapture(model.device),
            table_width=min(num_blocks, -(-model.context_len // block_size)),
            block_size=block_size,
            scratch_block=attention.scratch_block,
        )
    except RuntimeError as error:
        log.warning("runs without CUDA graphs: %s", error)
        return model


def _moved(batch: RaggedBatch, device: torch.device) -> RaggedBatch:
    """The same batch on another device."""
    return replace(
        batch,
        token_ids=batch.token_ids.to(device),
        positions=batch.positions.to(device),
        slots=batch.slots.to(device),
        block_table=batch.block_table.to(device),
        logit_rows=batch.logit_rows.to(device),
    )
