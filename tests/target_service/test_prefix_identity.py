"""A warm prefix cache, and forks, change no token: identity with a cold cache and with none.

As `test_identity.py`: tiny float64 models, drafts under scripts of arrivals.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from common.engine.block_manager import BlockManager
from common.types import OpenSequence, SamplingParams
from draft_service.drafters import Drafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.ngram import NgramDrafter
from target_service.engine import TargetEngine
from target_service.scheduler import SchedulerConfig
from tests.driver import Driver, HookedModel, Script
from tests.models import CONFIGS, VOCAB, paged

NUM, MAX_TOKENS = 6, 24
SCRIPTS = [Script([0, 2, 1], [1, 3], [0, 1]), Script([1, 0, 4], [2], split=True)]


def _opens(first: int, temperature: float, forks: bool) -> list[OpenSequence]:
    """Prompts of 40 and more tokens that begin alike; the second half are choices of the first."""
    opens = []
    for i in range(NUM):
        parent = i % (NUM // 2) if forks else i
        length = 40 + 7 * (parent % 3)
        prompt = tuple((j * j + j // 33 * parent) % (VOCAB - 2) + 2 for j in range(length))
        params = SamplingParams(
            temperature=temperature, max_tokens=MAX_TOKENS, seed=100 + i, ignore_eos=True
        )
        fork_of = first + parent if parent != i else 0
        opens.append(OpenSequence(first + i, prompt, length, params, 5, fork_of=fork_of))
    return opens


def _run(
    family: str, drafter: str, temperature: float, *, rounds: int, caching: bool, forks: bool,
    num_blocks: int = 128,
) -> tuple[list[list[list[int]]], list[int], int]:  # fmt: skip
    """Texts and cached tokens of each round of the same requests, and preemptions."""
    model = HookedModel(paged(family))
    blocks = BlockManager(num_blocks, 16, prefix_cache=caching)
    engine = TargetEngine(model, blocks, config=SchedulerConfig(max_rows=48, watermark=0.0))
    draft: Drafter = NgramDrafter(1, 3)
    if drafter == "self":
        own = BlockManager(96, 16, prefix_cache=caching)
        draft = ModelDrafter(paged(family, "draft"), own)
    texts, found = [], []
    for i in range(rounds):
        driver = Driver(engine, model, lambda: draft, replace(SCRIPTS[i % 2]))
        opens = _opens(1 + i * NUM, temperature, forks)
        driver.run(opens)
        blocks.check_integrity()
        assert blocks.num_free == num_blocks
        texts.append([driver.texts[o.sequence_id] for o in opens])
        found.append(sum(driver.verdicts[o.sequence_id][0].num_cached for o in opens))
    return texts, found, engine.scheduler.num_preemptions


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", ["ngram", "self"])
@pytest.mark.parametrize("family", CONFIGS)
def test_cold_warm_off_and_forked_are_the_same(
    family: str, drafter: str, temperature: float, show: Callable[[str], None]
) -> None:
    run = partial(_run, family, drafter, temperature)
    (off,), none, _ = run(rounds=1, caching=False, forks=False)
    (cold, warm), found, _ = run(rounds=2, caching=True, forks=False)
    assert none == [0]
    assert found[1] >= NUM * 32 > found[0]
    assert off == cold == warm
    texts, forked, _ = run(rounds=2, caching=True, forks=True)
    (alone,), _, _ = run(rounds=1, caching=False, forks=True)  # forks work without the cache too
    assert forked[0] >= (NUM // 2) * 39
    assert texts == [alone, alone]
    assert alone[: NUM // 2] == off[: NUM // 2]
    show(f"prefix identity {family:6} {drafter:5} T={temperature} found {found} forked {forked}")


@pytest.mark.parametrize("family", CONFIGS)
def test_preempted_with_and_without_the_cache(family: str) -> None:
    """Blocks for half of the sequences: what is recomputed out of the cache is what it was."""
    run = partial(_run, family, "ngram", 1.0, rounds=1, forks=True)
    (roomy,), *_ = run(caching=False)
    (short,), _, num_warm = run(caching=True, num_blocks=9)
    (cold,), _, num_cold = run(caching=False, num_blocks=9)
    assert min(num_warm, num_cold) > 0
    assert roomy == short == cold
