"""The law of the output, summed over all noise, equals the target's.

A vocabulary of three, texts of three tokens, the real engine and the real model drafter over
table models, every arrival pattern of the drafts; and p that depends on the text before, draft
tokens included. Probabilities are exact sums (see
`tests/enumerate_noise.py`), so the error is rounding: below 1e-12.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from common.engine.adjustments import Adjustments, RowEdit
from common.engine.block_manager import BlockManager
from common.engine.noise import Domain, Noise, NoiseKeys
from common.types import FloatArray, OpenSequence, Rule, SamplingParams, Tokens
from draft_service.drafters.model import ModelDrafter
from target_service.engine import TargetEngine
from tests.driver import Driver, HookedModel, Script
from tests.enumerate_noise import Chooser, EnumeratingNoise, outcomes
from tests.models import TableModel

V, LENGTH, PROMPT = 3, 3, (1,)
TOLERANCE = 1e-12


def _table(seed: int, sharp: float) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.normal(scale=sharp, size=(4, V, V)))


TARGET = _table(1, 1.0)
DRAFTS = {
    "good": TARGET + 0.3 * _table(2, 1.0),
    "bad": _table(3, 2.0),
    "opposed": -4.0 * TARGET,
}
# When a piece arrives, in half steps: before the next pass, during it, before or during the
# one after. Of three tokens the last is never drafted, so two pieces and what follows them.
DELAYS = list(itertools.product((0, 1, 2, 3), repeat=2))
PATTERNS = [Script(list(d), [pace], [0]) for d in DELAYS for pace in (1, 2)]
MORE_PATTERNS = [
    Script(list(d), pace, [lag])
    for d in itertools.product((0, 1, 3), repeat=3)
    for pace in ([1], [2], [0, 2])
    for lag in (0, 1)
]


@dataclass
class Sum:
    """What came out of all paths of one or more patterns."""

    law: dict[tuple[int, ...], float] = field(default_factory=lambda: defaultdict(float))
    counts: Counter[str] = field(default_factory=Counter)


def _sum(
    script: Script,
    params: SamplingParams,
    draft: torch.Tensor,
    drafter_noise: Callable[[EnumeratingNoise], Noise] = lambda noise: noise,
    eos: Tokens = (),
) -> Sum:
    found = Sum()

    def program(chooser: Chooser) -> tuple[int, ...]:
        noise = EnumeratingNoise(chooser)
        model = HookedModel(TableModel(TARGET))
        engine = TargetEngine(model, BlockManager(4, 4), noise=noise, eos_token_ids=eos)
        drafter = ModelDrafter(
            TableModel(draft), BlockManager(4, 4), noise=drafter_noise(noise), eos_token_ids=eos
        )
        driver = Driver(engine, model, lambda: drafter, script)
        text = driver.run([OpenSequence(1, PROMPT, 1, params, lookahead=2)])[1]
        found.counts.update(driver.counts)
        return tuple(text)

    for text, probability in outcomes(program):
        found.law[text] += probability
        found.counts["paths"] += 1
    return found


def _expected(top_k: int = 0) -> dict[tuple[int, ...], float]:
    """The target's own law, by plain numpy."""

    def p(position: int, last: int) -> FloatArray:
        logits = TARGET[position % 4, last].numpy()
        w = np.exp(logits)
        if top_k:
            w[np.argsort(-logits)[top_k:]] = 0.0
        normalised: FloatArray = w / w.sum()
        return normalised

    law = {}
    for text in itertools.product(range(V), repeat=LENGTH):
        tokens = (*PROMPT, *text)
        law[text] = float(np.prod([p(i, tokens[i])[tokens[i + 1]] for i in range(LENGTH)]))
    return law


def _error(law: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]) -> float:
    return max(abs(law[text] - expected[text]) for text in expected)


def _params(rule: Rule, top_k: int = 0) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=LENGTH, rule=rule, top_k=top_k, seed=5)


def _check(
    rule: Rule, draft: str, patterns: list[Script], top_k: int, show: Callable[[str], None]
) -> None:
    expected, counts, worst = _expected(top_k), Counter[str](), 0.0
    for script in patterns:
        found = _sum(script, _params(rule, top_k), DRAFTS[draft])
        worst = max(worst, _error(found.law, expected))
        counts.update(found.counts)
    show(
        f"exact law {rule.name:9} {draft:8} {len(patterns)} arrival patterns,"
        f" {counts['paths']} paths, tested {counts['tested']}, accepted {counts['accepted']},"
        f" stale {counts['stale']}, largest error {worst:.1e}"
    )
    assert counts["tested"] > 0
    assert counts["stale"] > 0
    assert worst < TOLERANCE


@pytest.mark.parametrize(
    ("rule", "draft"),
    [
        (Rule.REJECTION, "good"),
        (Rule.COUPLED, "good"),
        pytest.param(Rule.REJECTION, "opposed", marks=pytest.mark.heavy),
        pytest.param(Rule.REJECTION, "bad", marks=pytest.mark.heavy),
        pytest.param(Rule.COUPLED, "bad", marks=pytest.mark.heavy),
        pytest.param(Rule.COUPLED, "opposed", marks=pytest.mark.heavy),
    ],
)
def test_law_of_the_output(rule: Rule, draft: str, show: Callable[[str], None]) -> None:
    _check(rule, draft, PATTERNS, 0, show)


@pytest.mark.heavy
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.COUPLED])
def test_law_of_the_output_in_more_patterns(
    rule: Rule, draft: str, top_k: int, show: Callable[[str], None]
) -> None:
    _check(rule, draft, MORE_PATTERNS[:: 1 + 2 * top_k], top_k, show)


# -- p depends on the text before ------------------------------------------------------

EOS = (2,)
HISTORIES: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1.5, "ignore_eos": True},
    "presence": {"presence_penalty": -1.2, "ignore_eos": True},
    "repetition": {"repetition_penalty": 1.8, "ignore_eos": True},
    "min_tokens": {"min_tokens": 2, "logit_bias": ((2, 1.5),)},
    "all": {
        "logit_bias": ((0, -0.7), (2, 1.0)),
        "repetition_penalty": 0.6,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "min_tokens": 1,
        "temperature": 1.4,
    },
}
SOME_PATTERNS = PATTERNS[::5]


def _next_p(params: SamplingParams, output: Tokens) -> FloatArray:
    """The definition, by plain numpy."""
    text = PROMPT + output
    x = TARGET[(len(text) - 1) % 4, text[-1]].numpy().copy()
    for token, bias in params.logit_bias:
        x[token] += bias
    for token in set(text):
        x[token] *= params.repetition_penalty ** (-1 if x[token] > 0 else 1)
    for token in set(output):
        x[token] -= params.presence_penalty + params.frequency_penalty * output.count(token)
    if len(output) < params.min_tokens:
        x[list(EOS)] = -np.inf
    w = np.exp(x / params.temperature)
    normalised: FloatArray = w / w.sum()
    return normalised


def _law_of(params: SamplingParams, output: Tokens = ()) -> dict[Tokens, float]:
    """Every text from here on and its probability."""
    ended = output and output[-1] in EOS and not params.ignore_eos
    if ended or len(output) == LENGTH:
        return {output: 1.0}
    law: dict[Tokens, float] = {}
    for token, p in enumerate(_next_p(params, output)):
        if p > 0:
            law |= {t: p * rest for t, rest in _law_of(params, (*output, token)).items()}
    return law


def _history_params(rule: Rule, history: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "rule": rule, "seed": 5, **HISTORIES[history]})


@pytest.mark.parametrize("draft", ["good", "bad"])
@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.COUPLED])
def test_law_of_the_output_where_p_depends_on_the_text(
    rule: Rule, history: str, draft: str, show: Callable[[str], None]
) -> None:
    params = _history_params(rule, history)
    expected, counts, worst = _law_of(params), Counter[str](), 0.0
    for script in SOME_PATTERNS:
        found = _sum(script, params, DRAFTS[draft], eos=EOS)
        assert set(found.law) <= set(expected)
        worst = max(worst, _error(found.law, expected))
        counts.update(found.counts)
    show(
        f"exact law {rule.name:9} {draft:4} {history:10} {len(SOME_PATTERNS)} arrival patterns,"
        f" {counts['paths']} paths, accepted {counts['accepted']}, largest error {worst:.1e}"
    )
    assert counts["tested"] > counts["accepted"] > 0
    assert worst < TOLERANCE


@pytest.mark.parametrize("history", ["frequency", "presence", "repetition", "min_tokens"])
@pytest.mark.parametrize("rule", [Rule.REJECTION, Rule.COUPLED])
def test_a_target_that_forgets_the_draft_tokens_ahead_is_seen(
    rule: Rule, history: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is not blind: let every row of a run be adjusted by the committed text alone."""

    def forgetful(self: Adjustments, ahead: list[int]) -> list[RowEdit | None]:
        return [self.edit()] * (1 + len(ahead))

    params, script = _history_params(rule, history), Script([0], [2])
    honest = _sum(script, params, DRAFTS["good"], eos=EOS)
    monkeypatch.setattr(Adjustments, "edits_along", forgetful)
    wrong = _sum(script, params, DRAFTS["good"], eos=EOS)
    assert _error(honest.law, _law_of(params)) < TOLERANCE
    assert _error(wrong.law, _law_of(params)) > 1e-3


def test_shared_noise_under_rejection_is_seen() -> None:
    """The sum is not blind: let the draft draw from the noise that resampling uses."""

    class Leaky:
        def __init__(self, noise: EnumeratingNoise) -> None:
            self._noise = noise

        def keep(self, keys: NoiseKeys, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
            return self._noise.keep(keys, p, q)

        def choose(
            self,
            keys: NoiseKeys,
            domain: Domain,
            log_w: torch.Tensor,
            likeliest: torch.Tensor | None = None,
        ) -> torch.Tensor:
            return self._noise.choose(keys, Domain.RESIDUAL, log_w)

        def likeliest(self, x: torch.Tensor) -> torch.Tensor:
            return self._noise.likeliest(x)

    script, params = Script([0], [2]), _params(Rule.REJECTION)
    honest = _error(_sum(script, params, DRAFTS["good"]).law, _expected())
    leaky = _error(_sum(script, params, DRAFTS["good"], Leaky).law, _expected())
    assert honest < TOLERANCE
    assert leaky > 1e-3


def test_coupling_is_as_likely_as_theory_says() -> None:
    """P(x = y) under Gumbel coupling is the sum over i of 1 / sum_v max(p_v / p_i, q_v / q_i)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.6, 0.3])
    keys = NoiseKeys(np.zeros(1, np.uint64), np.zeros(1, np.int64))

    def program(chooser: Chooser) -> bool:
        noise = EnumeratingNoise(chooser)
        x, y = (noise.choose(keys, Domain.TOKEN, torch.from_numpy(w).log()[None]) for w in (q, p))
        return bool(x == y)

    equal = sum(probability for same, probability in outcomes(program) if same)
    theory = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(V))
    assert equal == pytest.approx(theory, abs=1e-14)
