"""Nothing changes the answer: identity over every parameter and everything that may befall it.

Every pair of values of the table below occurs together in `make test`, every triple in
`make test-all`; the full product would be some hundred thousand runs. The reference is each
sequence alone, undrafted, without a prefix cache. As `test_identity.py`: tiny float64 models,
drafts under scripts of arrivals.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from common.engine.block_manager import BlockManager
from common.types import IntArray, OpenSequence, SamplingParams
from draft_service.drafters import Drafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.ngram import NgramDrafter
from target_service.cost import Shape, StepCost
from target_service.engine import TargetEngine
from target_service.goodput import DraftPolicy, Fixed, Goodput, Objective
from target_service.scheduler import SchedulerConfig
from target_service.sequence import Sequence
from tests.covering import covering
from tests.driver import Driver, HookedModel, Script
from tests.fixed import FixedDrafter
from tests.models import CONFIGS, VOCAB, paged
from tests.params import EOS, VARIANTS

MAX_TOKENS, LOOKAHEAD, NUM_CHOICES = 20, 6, 2
VALUES: dict[str, list[Any]] = {
    "params": list(VARIANTS),
    "draft": ["none", "ngram", "self", "other", "wrong", "random", "late"],
    "policy": ["fixed", "latency", "throughput", "changing"],
    "temperature": [0.0, 0.3, 1.0, 2.0],
    "family": list(CONFIGS),
    "cache": ["off", "cold", "warm"],
    "max_rows": [5, 17, 64],
    "mates": ["alone", "together", "coming and going"],
    "fate": ["kept", "draft restarted", "target replaced"],
    "memory": ["ample", "short"],
    "choices": ["own prompts", "forks"],
}


class Case(NamedTuple):
    """One run; the fields are the keys of VALUES."""

    params: str
    draft: str
    policy: str
    temperature: float
    family: str
    cache: str
    max_rows: int
    mates: str
    fate: str
    memory: str
    choices: str


def _cases(strength: int) -> list[Case]:
    return [Case(*values) for values in covering(list(VALUES.values()), strength)]


def _prompt(sid: int) -> tuple[int, ...]:
    """40 tokens and more; they begin alike, and repeat themselves."""
    length = 40 + 9 * (sid % 3)
    return tuple((j * j + j // 34 * sid) % (VOCAB - 2) + 2 for j in range(length))


def _open(sid: int, case: Case, lookahead: int) -> OpenSequence:
    parent = sid - sid % NUM_CHOICES
    forks = case.choices == "forks"
    prompt = _prompt(parent if forks else sid)
    params = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | VARIANTS[case.params]
    return OpenSequence(
        sequence_id=sid,
        token_ids=prompt,
        num_prompt=len(prompt),
        sampling=SamplingParams(temperature=case.temperature, seed=1000 + sid, **params),
        lookahead=lookahead,
        fork_of=parent if forks and parent != sid else 0,
    )


class Changing(Fixed):
    """Any number of drafted rows, any lookahead, from step to step."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(3)

    def runs(self, seqs: Iterable[Sequence], shape: Shape) -> IntArray:
        caps = [seq.run_len() for seq in seqs]
        return np.array([self._rng.integers(0, cap + 1) for cap in caps], np.int64)

    def tell(self, seqs: Iterable[Sequence]) -> None:
        for seq in seqs:
            seq.told_lookahead = int(self._rng.integers(0, seq.lookahead + 1))


def _policy(name: str) -> DraftPolicy:
    if name in ("fixed", "changing"):
        return Fixed() if name == "fixed" else Changing()
    cost = StepCost(np.array([1, 64]), np.array([0.01, 0.02]), 1e-4, 1e-6)
    return Goodput(cost, Objective(name))


def _engine(case: Case, model: HookedModel) -> tuple[TargetEngine, BlockManager]:
    num_blocks = 9 if case.memory == "short" else 128
    blocks = BlockManager(num_blocks, 16, prefix_cache=case.cache != "off")
    config = SchedulerConfig(max_rows=case.max_rows, watermark=0.0)
    engine = TargetEngine(
        model, blocks, eos_token_ids=(EOS,), config=config, policy=_policy(case.policy)
    )
    return engine, blocks


@cache
def _alone(case: Case, sid: int) -> list[int]:
    """The text of one sequence with the engine for itself, undrafted, nothing shared."""
    model = HookedModel(paged(case.family))
    engine, _ = _engine(case, model)
    o = replace(_open(sid, case, 0), fork_of=0)
    return Driver(engine, model, None, Script()).run([o])[sid]


def _reference(case: Case, sid: int) -> list[int]:
    plain = case._replace(
        draft="none", policy="fixed", cache="off", max_rows=64, mates="alone", fate="kept",
        memory="ample",
    )  # fmt: skip
    return _alone(plain, sid)


def _drafter(case: Case, sids: Iterable[int]) -> Drafter:
    texts = {sid: _reference(case, sid) for sid in sids}
    prompts = {sid: len(_open(sid, case, 0).token_ids) for sid in sids}

    def truth(sid: int, position: int) -> int:
        text = texts[sid]
        return text[min(position - prompts[sid], len(text) - 1)]

    match case.draft:
        case "ngram":
            return NgramDrafter(1, 3)
        case "self" | "other":
            swapped = {"llama": "gpt2", "qwen3": "llama", "gpt2": "qwen3"}
            family = case.family if case.draft == "self" else swapped[case.family]
            own = BlockManager(96, 16, prefix_cache=case.cache != "off")
            return ModelDrafter(paged(family, "draft"), own, eos_token_ids=(EOS,))
        case "wrong":
            return FixedDrafter(lambda sid, i: (truth(sid, i) + 1) % VOCAB)
        case "random":
            return FixedDrafter(lambda sid, i: (truth(sid, i) + (sid * 31 + i * i) % 2) % VOCAB)
        case "late":
            return FixedDrafter(truth)
    raise AssertionError(case.draft)


def _script(case: Case) -> Script:
    late = case.draft == "late"
    return Script(
        piece_delays=[4, 5, 6] if late else [0, 1, 0, 2, 1, 3, 0],
        draft_steps=[1, 3, 2, 0, 2],
        commit_delays=[0, 1, 0, 2],
        split=case.max_rows == 17,
        restart_at=5 if case.fate == "draft restarted" and case.draft != "none" else None,
        replace_at=6 if case.fate == "target replaced" else None,
    )


def _play(case: Case, driver: Driver, sids: list[int]) -> Iterator[TargetEngine]:
    """Run a case; yields every engine that takes part once it is done with."""
    coming = case.mates == "coming and going"
    for i, sid in enumerate(sids):
        driver.open(_open(sid, case, LOOKAHEAD))
        if coming:
            driver.step()
            if i % 2:
                passing = replace(_open(100 + sid, case, LOOKAHEAD), fork_of=0)
                driver.open(passing)
                driver.step()
                driver.close(passing.sequence_id)
        yield driver.target
    for _ in range(3000):
        if not driver.num_open:
            return
        driver.step()
        yield driver.target
    raise AssertionError("not finished")


def _check(case: Case, counts: Counter[str]) -> None:
    model = HookedModel(paged(case.family))
    managers: list[BlockManager] = []
    engines: dict[int, TargetEngine] = {}

    def make_target() -> TargetEngine:
        engine, blocks = _engine(case, model)
        managers.append(blocks)
        return engine

    sids = [2] if case.mates == "alone" else [2, 3, 4, 5, 6, 7]
    sids += [3] if case.choices == "forks" and case.mates == "alone" else []
    known = [*sids, *(100 + sid for sid in sids)]
    make = None if case.draft == "none" else partial(_drafter, case, known)
    if make is not None:
        make()  # finds out texts with the same model, and so in the same cache
    for sid in sids:
        _reference(case, sid)
    target = make_target()
    if case.cache == "warm":
        opens = [_open(sid, case, 0) for sid in sids]
        warm = [replace(o, sequence_id=50 + o.sequence_id, fork_of=0) for o in opens]
        Driver(target, model, None, Script()).run(warm)
    driver = Driver(target, model, make, _script(case), make_target)
    for engine in _play(case, driver, sids):
        engines[id(engine)] = engine
    for sid in sids:
        assert driver.texts[sid] == _reference(case, sid), case
    managers[-1].check_integrity()
    assert managers[-1].num_free == managers[-1].num_blocks
    counts.update(driver.counts)
    counts["runs"] += 1
    counts["cached"] += sum(v.num_cached for vs in driver.verdicts.values() for v in vs)
    counts["preempted"] += sum(e.scheduler.num_preemptions for e in engines.values())


def _check_all(cases: list[Case], show: Callable[[str], None]) -> None:
    counts: Counter[str] = Counter()
    for case in cases:
        _check(case, counts)
    show("identity, wide: " + ", ".join(f"{name} {num}" for name, num in counts.items()))
    for needed in ("tested", "accepted", "recovered", "stale", "cached", "preempted"):
        assert counts[needed] > 0, f"nothing was {needed}"


PAIRS = _cases(2)
NUM_PARTS = 8


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_pair_of_circumstances(part: int, show: Callable[[str], None]) -> None:
    _check_all(PAIRS[part::NUM_PARTS], show)


@pytest.mark.heavy
@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_every_triple_of_circumstances(part: int, show: Callable[[str], None]) -> None:
    _check_all(_cases(3)[part::NUM_PARTS], show)
