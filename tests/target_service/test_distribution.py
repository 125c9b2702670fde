"""The law of texts that the engine commits, by chi-square against the target's own.

Real noise, the engine's own inbox and steps, the real model drafter, random arrival, filters
on, 16 interleaved sequences, the same seed given to draft and target. 50,000 texts of three
tokens for each draft. A correct engine fails a test with probability 1e-6 (`FALSE_ALARM`);
the planted biases at the end must be caught at the same level.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from common.engine.block_manager import BlockManager
from common.engine.noise import Domain, GumbelNoise, Noise, NoiseKeys, stream_keys, uniform
from common.types import FloatArray, OpenSequence, Proposal, Rule, SamplingParams
from draft_service.drafters import Drafter
from draft_service.drafters.model import ModelDrafter
from target_service.engine import TargetEngine
from target_service.sequence import Sequence
from tests.driver import Driver, HookedModel, Script
from tests.models import TableModel

FALSE_ALARM = 1e-6
NUM_TEXTS = 50_000
V, LENGTH, PROMPT, BATCH = 6, 3, (2,), 16
TEMPERATURE, TOP_K, TOP_P = 0.9, 5, 0.92


def _table(seed: int, scale: float) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(scale=scale, size=(4, V, V)))


TARGET = _table(11, 1.2)


def _p(position: int, last: int) -> FloatArray:
    """The target's filtered distribution, written anew in plain numpy."""
    logits = TARGET[position % 4, last].numpy() / TEMPERATURE
    p = np.exp(logits - logits.max())
    order = np.argsort(-p)
    p[order[TOP_K:]] = 0.0
    p /= p.sum()
    before = np.cumsum(p[order]) - p[order]
    p[order[before >= TOP_P]] = 0.0
    normalised: FloatArray = p / p.sum()
    return normalised


def _disjoint() -> torch.Tensor:
    """A draft that knows just the tokens that the target's filters drop."""
    p = np.array([[_p(position, last) for last in range(V)] for position in range(4)])
    return torch.where(torch.from_numpy(p) > 0, -torch.inf, TARGET)


DRAFTS = {"good": TARGET + _table(12, 0.4), "bad": _table(13, 2.0), "disjoint": _disjoint()}
CASES = [
    pytest.param(rule, draft, marks=[pytest.mark.heavy] if i else [])
    for rule in (Rule.REJECTION, Rule.COUPLED)
    for i, draft in enumerate(DRAFTS)
]


def _expected() -> dict[tuple[int, ...], float]:
    law = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        tokens = (*PROMPT, *text)
        law[text] = float(np.prod([_p(i, tokens[i])[tokens[i + 1]] for i in range(LENGTH)]))
    return {text: probability for text, probability in law.items() if probability > 0}


class Sampler:
    """Keeps 16 sequences going, each new one as soon as an old one has ended."""

    def __init__(
        self,
        rule: Rule,
        draft: str,
        drafter: type[ModelDrafter] = ModelDrafter,
        noise: Noise | None = None,
    ) -> None:
        rng = np.random.default_rng(99)
        model = HookedModel(TableModel(TARGET))
        engine = TargetEngine(model, BlockManager(64, 4), noise=noise)

        def make() -> Drafter:
            return drafter(TableModel(DRAFTS[draft]), BlockManager(64, 4), support=4)

        script = Script(
            piece_delays=rng.choice(4, 9973, p=[0.5, 0.2, 0.2, 0.1]).tolist() * 200,
            draft_steps=rng.choice(3, 9967, p=[0.2, 0.4, 0.4]).tolist() * 50,
            commit_delays=rng.choice(2, 9949, p=[0.8, 0.2]).tolist() * 200,
        )
        self.driver = Driver(engine, model, make, script)
        self._rule = rule

    def texts(self, num: int) -> Counter[tuple[int, ...]]:
        """How often each text came out."""
        found: Counter[tuple[int, ...]] = Counter()
        for sid in range(BATCH):
            self._open(sid)
        opened = BATCH
        while found.total() < num:
            for verdict in self.driver.step():
                if verdict.ended:
                    found[tuple(self.driver.texts.pop(verdict.sequence_id))] += 1
                    del self.driver.verdicts[verdict.sequence_id]
                    self._open(opened)
                    opened += 1
        return found

    def _open(self, sid: int) -> None:
        params = SamplingParams(
            temperature=TEMPERATURE,
            top_k=TOP_K,
            top_p=TOP_P,
            max_tokens=LENGTH,
            rule=self._rule,
            seed=sid,
        )
        self.driver.open(OpenSequence(sid, PROMPT, 1, params, lookahead=2))


def _p_value(found: Counter[tuple[int, ...]]) -> float:
    """Chi-square against the target's law; texts with fewer than 5 expected are pooled."""
    expected, total = _expected(), found.total()
    if set(found) - set(expected):
        return 0.0  # a text that the filters forbid
    common = [t for t, p in expected.items() if p * total >= 5]
    observed = [found[t] for t in common]
    theory = [expected[t] * total for t in common]
    rest = total - sum(theory)
    if rest > 1e-6:
        observed.append(total - sum(observed))
        theory.append(rest)
    theory = (np.array(theory) * (total / np.sum(theory))).tolist()
    return float(chisquare(observed, theory).pvalue)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("rule", "draft"), CASES)
def test_law_of_texts(rule: Rule, draft: str, show: Callable[[str], None]) -> None:
    sampler = Sampler(rule, draft)
    found = sampler.texts(NUM_TEXTS)
    p_value, counts = _p_value(found), sampler.driver.counts
    show(
        f"distribution {rule.name:9} {draft:8} {found.total()} texts, tested {counts['tested']},"
        f" accepted {counts['accepted']}, p-value {p_value:.3f} (false alarm {FALSE_ALARM:.0e})"
    )
    assert counts["tested"] > NUM_TEXTS / 4
    assert (counts["accepted"] == 0) == (draft == "disjoint")
    assert p_value > FALSE_ALARM


class SharedNoise(GumbelNoise):
    """Bias 1: r is the uniform from which the draft's token was drawn."""

    def keep(self, keys: NoiseKeys, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        r = uniform(stream_keys(keys, Domain.DRAFT), V).amax(dim=1)
        return r * q < p


class ShyDrafter(ModelDrafter):
    """Bias 2: withholds a token because of that token's own probability."""

    def step(self) -> list[Proposal]:
        return [p for p in super().step() if p.distributions[0].probs.max() < 2 * self._prob(p)]

    @staticmethod
    def _prob(p: Proposal) -> float:
        (dist,) = p.distributions
        return float(dist.probs[dist.token_ids == p.token_ids[0]].sum())


def test_noise_shared_between_drafting_and_acceptance_is_caught() -> None:
    sampler = Sampler(Rule.REJECTION, "bad", noise=SharedNoise())
    assert _p_value(sampler.texts(10_000)) < FALSE_ALARM


def test_a_drafter_that_withholds_tokens_is_caught() -> None:
    sampler = Sampler(Rule.REJECTION, "bad", drafter=ShyDrafter)
    assert _p_value(sampler.texts(20_000)) < FALSE_ALARM


def test_a_target_that_drops_proposals_by_their_id_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer = Sequence.offer

    def picky(self: Sequence, p: Proposal, vocab_size: int) -> None:
        offer(self, p if p.token_ids[0] % 2 else replace(p, start=p.start + 1), vocab_size)

    monkeypatch.setattr(Sequence, "offer", picky)
    sampler = Sampler(Rule.REJECTION, "bad")
    assert _p_value(sampler.texts(10_000)) < FALSE_ALARM
