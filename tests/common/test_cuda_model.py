"""Passes through graphs say what the same passes say without: padding touches nobody.

On a CPU, in float64, over imitations of the kernel and of a capture (`tests/cuda_fakes.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import ModelConfig
from common.engine import loader
from common.engine.attention import CacheSpec
from common.engine.attention.cuda import CudaAttention
from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.cuda_model import ROW_BUCKETS, GraphedModel, captured
from common.engine.paged_model import LanguageModel, PagedModel
from common.engine.probe import LayerCall, is_row_invariant
from common.errors import ConfigurationError
from common.types import OpenSequence, SamplingParams
from draft_service.drafters.model import ModelDrafter
from target_service.engine import TargetEngine
from tests.cuda_fakes import FakeCapture, attention_of, cuda_like
from tests.driver import Driver, HookedModel, Script
from tests.models import VOCAB, paged, transformer

BLOCK, NUM_BLOCKS = 4, 600


def _graphed(family: str = "llama", capture: FakeCapture | None = None) -> GraphedModel:
    model, _ = cuda_like(
        transformer(family),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK,
        capture=capture or FakeCapture(),
    )
    assert isinstance(model, GraphedModel)
    return model


@cache
def _reference() -> PagedModel:
    return paged("llama", "cuda", num_kv_tokens=NUM_BLOCKS * 16)


class Pair:
    """The same texts through both models; every logit is compared."""

    def __init__(self, model: LanguageModel) -> None:
        self._models = (model, _reference())
        self._blocks = (BlockManager(NUM_BLOCKS, BLOCK), BlockManager(NUM_BLOCKS, 16))
        self.lengths: dict[int, int] = {}
        self._random = np.random.default_rng(5)

    def feed(self, rows: dict[int, tuple[int, int]]) -> Tensor:
        """So many rows for each sequence, of which the last so many need logits."""
        spans = []
        for sid, (num, num_logits) in rows.items():
            start = self.lengths.setdefault(sid, 0)
            tokens = self._random.integers(0, VOCAB, num).tolist()
            spans.append(Span(sid, start, tokens, num_logits))
            self.lengths[sid] += num
            for blocks in self._blocks:
                if sid not in blocks:
                    blocks.open(sid)
                assert blocks.reserve(sid, start + num)
        found, expected = (
            m.forward(pack(spans, b, m.device)).logits
            for m, b in zip(self._models, self._blocks, strict=True)
        )
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-12)
        return found

    def truncate(self, sid: int, length: int) -> None:
        self.lengths[sid] = length
        for blocks in self._blocks:
            blocks.truncate(sid, length)


def test_every_number_of_rows_and_sequences_up_to_forty() -> None:
    """Decoding 1 to 40 sequences, then runs of all kinds, rolled back each time."""
    capture = FakeCapture()
    pair = Pair(_graphed(capture=capture))
    pair.feed({sid: (3 + sid % 7, 1) for sid in range(40)})
    for num in range(1, 41):
        pair.feed(dict.fromkeys(range(num), (1, 1)))
    for num in range(1, 41):
        lengths = dict(pair.lengths)
        rows = {sid: 1 + (sid * num) % 4 for sid in range(0, num, 1 + num % 3)}
        pair.feed({sid: (n, n) for sid, n in rows.items()})
        for sid in rows:
            pair.truncate(sid, lengths[sid])
    assert capture.num_replays >= 80


def test_runs_of_one_sequence_up_to_the_largest_graph() -> None:
    capture = FakeCapture()
    pair = Pair(_graphed(capture=capture))
    pair.feed({0: (2, 1)})
    for num in (2, 3, 47, 48, 49, 120):
        pair.feed({0: (num, num)})
        pair.truncate(0, 2)
    assert capture.num_replays == 7


def test_prompts_and_large_passes_run_as_they_are() -> None:
    capture = FakeCapture()
    pair = Pair(_graphed(capture=capture))
    pair.feed({0: (30, 1), 1: (20, 0)})
    pair.feed(dict.fromkeys(range(50), (6, 6)))  # 300 rows
    assert capture.num_replays == 0
    pair.feed({0: (2, 1), 1: (1, 1)})  # few enough rows without logits
    assert capture.num_replays == 1


@pytest.mark.parametrize("seed", range(4))
def test_any_ragged_mixture(seed: int) -> None:
    rng = np.random.default_rng(seed)
    pair = Pair(_graphed())
    for _ in range(40):
        sids = rng.permutation(8)[: rng.integers(1, 9)].tolist()
        rows = {}
        for sid in sids:
            num = int(rng.choice([1, 1, 1, 2, 5, 17]))
            if pair.lengths.get(sid, 0) + num < 60:
                rows[sid] = (num, int(rng.integers(0, num + 1)))
        if any(num for _, num in rows.values()):
            pair.feed(rows)
        for sid in rows:
            if rng.random() < 0.3:
                pair.truncate(sid, int(rng.integers(0, pair.lengths[sid])))


def test_logits_stay_what_they_were_after_the_next_pass() -> None:
    """A graph writes where it wrote before; who asked must have a copy."""
    pair = Pair(_graphed())
    first = pair.feed({0: (1, 1)})
    kept = first.clone()
    pair.feed({0: (1, 1)})
    assert torch.equal(first, kept)


def test_padding_writes_into_the_scratch_block_alone() -> None:
    model, attention = cuda_like(
        transformer("llama"), num_blocks=NUM_BLOCKS, block_size=BLOCK, capture=FakeCapture()
    )
    blocks = BlockManager(NUM_BLOCKS, BLOCK)
    blocks.open(0)
    blocks.reserve(0, 3)
    pools = (*attention._keys, *attention._values)
    for pool in pools:
        pool.zero_()
    model.forward(pack([Span(0, 0, [5, 6, 7], 3)], blocks, "cpu"))  # a graph of four rows
    (table,) = blocks.table(0)
    for pool in pools:
        written = pool.abs().amax(dim=(2, 3)) > 0  # [pages, page size]
        assert written[table].tolist() == [True, True, True, False]
        assert written[attention.scratch_block].tolist() == [True, False, False, False]
        assert int(written.sum()) == 4


def test_a_pass_leaves_nothing_of_the_one_before() -> None:
    """What the kernel is told of padding: one token each, then no rows, in the scratch block."""
    model = _graphed()
    pair = Pair(model)
    pair.feed(dict.fromkeys(range(8), (40, 1)))
    pair.feed(dict.fromkeys(range(7), (1, 1)))
    pair.feed(dict.fromkeys(range(5), (1, 1)))
    pair.feed({sid: (1 + sid, 1 + sid) for sid in (0, 1, 2)})
    single, run = (model._graphs[8, kind]._parts for kind in (True, False))
    assert single["query_start"].tolist() == list(range(9))
    assert run["query_start"].tolist() == [0, 1, 3, 6, 7, 8, 8, 8, 8]
    for parts, num in ((single, 5), (run, 3)):
        assert parts["context_len"][num:].tolist() == [1] * (8 - num)
        assert (parts["block_table"][num:] == NUM_BLOCKS).all()
        assert (parts["block_table"][:num, 0] < NUM_BLOCKS).all()


def test_drafting_does_not_change_the_answer() -> None:
    """Both services' engines over graphs; a draft that is mostly right, one that is not."""

    def run(draft: str | None, script: Script) -> Driver:
        hooked = HookedModel(_graphed())
        engine = TargetEngine(hooked, BlockManager(NUM_BLOCKS, BLOCK))

        def drafter() -> ModelDrafter:
            return ModelDrafter(_graphed(draft or ""), BlockManager(NUM_BLOCKS, BLOCK))

        driver = Driver(engine, hooked, drafter if draft else None, script)
        driver.run(
            [
                OpenSequence(
                    sequence_id=sid,
                    token_ids=tuple(range(2, 6 + sid)),
                    num_prompt=4 + sid,
                    sampling=SamplingParams(
                        temperature=sid % 2 * 1.0, max_tokens=20, seed=sid, ignore_eos=True
                    ),
                    lookahead=6 if draft else 0,
                )
                for sid in range(1, 6)
            ]
        )
        return driver

    expected = run(None, Script()).texts
    script = Script(piece_delays=[0, 1, 0, 2], draft_steps=[3])
    same, other = run("llama", script), run("gpt2", script)
    assert same.texts == other.texts == expected
    assert same.counts["accepted"] > 40
    assert other.counts["recovered"] > 5


# -- what can't be captured --------------------------------------------------------------


def test_it_says_that_it_has_graphs_and_is_checked_like_any_other() -> None:
    model = _graphed()
    assert model.features == ("cuda-graphs",)
    assert model.backend == "cuda"
    assert isinstance(is_row_invariant(model, BLOCK), bool)
    assert tuple(sorted(ROW_BUCKETS)) == ROW_BUCKETS


def _build(
    monkeypatch: pytest.MonkeyPatch, capture: FakeCapture, **settings: Any
) -> tuple[object, int]:
    """The loader's own way, as if the model were on a GPU."""

    def attention(spec: CacheSpec, calls: list[LayerCall], _: ModelConfig) -> CudaAttention:
        return attention_of(spec, [c.softcap for c in calls])

    monkeypatch.setattr(loader, "_attention", attention)
    monkeypatch.setattr(loader, "captured", partial(captured, capture=capture))
    return loader.build(transformer("llama"), ModelConfig(num_kv_tokens=500, **settings))


def test_the_loader_tries_out_what_it_built(monkeypatch: pytest.MonkeyPatch) -> None:
    capture = FakeCapture()
    model, num_blocks = _build(monkeypatch, capture)
    assert isinstance(model, GraphedModel)
    assert num_blocks == 32
    assert capture.num_replays > 0
    plain, _ = _build(monkeypatch, capture, cuda_graphs=False)
    assert isinstance(plain, PagedModel)
    assert plain.backend == "cuda"


def test_a_graph_that_says_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Forgetful(FakeCapture):
        def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
            out = run()  # of padding, and for ever
            return lambda: out

    with pytest.raises(
        ConfigurationError, match=r"--cuda-graphs: .* --no-cuda-graphs does without"
    ):
        _build(monkeypatch, Forgetful())


def test_a_model_with_reference_layers_has_no_graphs(caplog: pytest.LogCaptureFixture) -> None:
    model, attention = cuda_like(
        transformer("gemma2"), num_blocks=8, block_size=BLOCK, capture=FakeCapture()
    )
    assert isinstance(model, PagedModel)
    assert model.backend == attention.name == "cuda+reference"
    assert "without CUDA graphs: some layers" in caplog.text


def test_a_capture_that_fails_leaves_the_model_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(FakeCapture):
        def __call__(self, run: object) -> object:  # type: ignore[override]
            raise RuntimeError("operation not permitted when stream is capturing")

    with caplog.at_level(logging.WARNING):
        model, _ = cuda_like(
            transformer("llama"), num_blocks=8, block_size=BLOCK, capture=Refusing()
        )
    assert isinstance(model, PagedModel)
    assert "without CUDA graphs: operation not permitted" in caplog.text
