"""The packaged model reads a prompt of 30,000 characters once, and says the same again."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

from common.config import ModelConfig
from common.engine.block_manager import BlockManager
from common.engine.loader import load
from common.engine.native.build import library
from common.tokenizer import Tokenizer
from common.types import OpenSequence, SamplingParams, Verdict
from target_service.engine import TargetEngine

CACHE = ModelConfig().cache_dir
NUM_CHARACTERS, NUM_TOKENS = 30_000, 24


@pytest.mark.heavy
@pytest.mark.skipif(library(CACHE)[0] is None, reason=f"no native step here: {library(CACHE)[1]}")
def test_a_long_prompt_is_served_warm_as_it_was_cold(show: Callable[[str], None]) -> None:
    torch.set_num_threads(1)
    loaded = load(ModelConfig(backend="native"))
    blocks = BlockManager(loaded.num_blocks, loaded.info.block_size)
    engine = TargetEngine(loaded.model, blocks, eos_token_ids=loaded.info.eos_token_ids)
    people = ("warden", "clerk", "ferryman", "baker", "doctor", "gardener", "teacher")
    goods = ("salt", "rope", "oil", "figs", "copper", "paper", "wool", "bread", "apples")
    places = ("north gate", "old bridge", "market", "harbour", "station")
    lines = (
        f"The {people[i % 7]} signed for {goods[i % 9]} and {goods[i * i % 9]} at the"
        f" {places[i % 5]}, and nobody asked the {people[i // 7 % 7]} what it was for.\n"
        for i in range(1000)
    )
    text = "".join(lines)[:NUM_CHARACTERS]
    ids = Tokenizer(loaded.tokenizer_files).encode(text)

    def answer(sid: int) -> tuple[list[int], int, float]:
        params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        engine.submit(OpenSequence(sid, tuple(ids), len(ids), params))
        verdicts: list[Verdict] = []
        began, first = time.monotonic(), 0.0
        while engine.has_work():
            verdicts += engine.step().verdicts
            first = first or (time.monotonic() - began if verdicts else 0.0)
        return [t for v in verdicts for t in v.token_ids], verdicts[0].num_cached, first

    cold, none, cold_seconds = answer(1)
    warm, found, warm_seconds = answer(2)
    assert len(cold) == NUM_TOKENS
    assert warm == cold
    assert none == 0
    assert found == (len(ids) - 1) // 16 * 16
    blocks.check_integrity()
    assert blocks.num_free == blocks.num_blocks
    show(
        f"prompt of {len(text)} characters, {len(ids)} tokens: first token after"
        f" {cold_seconds:.2f} s cold, {warm_seconds:.2f} s warm"
    )
    assert warm_seconds < cold_seconds / 5
