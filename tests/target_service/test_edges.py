"""The edges of the sampler and of a text's end, drafted and undrafted, on tiny real models.

Drafts are told beforehand, right or wrong; everything that a sequence is told is closed:
every draft token received is tested or stale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from common.engine.block_manager import BlockManager
from common.engine.paged_model import LanguageModel
from common.types import FinishReason, OpenSequence, Rule, SamplingParams
from draft_service.drafters import Drafter
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.ngram import NgramDrafter
from draft_service.sequence import DraftSequence
from target_service.engine import TargetEngine
from tests.counting import CountingDrafter
from tests.driver import Driver, HookedModel, Script
from tests.models import CONTEXT, VOCAB, TableModel, paged
from tests.params import EOS, VARIANTS

PROMPT = (5, 17, 40, 8, 17)
LOOKAHEAD = 8
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]


class Knowing(CountingDrafter):
    """Guesses given texts, wrong by one in id at some positions of the output."""

    def __init__(self, texts: dict[int, list[int]], wrong: Callable[[int], bool]) -> None:
        super().__init__()
        self._texts, self._wrong = texts, wrong

    def _guess(self, s: DraftSequence) -> list[int]:
        # All these prompts are of one length; beyond the text anything will do.
        first = len(s.tokens) - len(PROMPT)
        text = [*self._texts[s.sid][first : first + s.num_wanted]]
        text += [0] * (s.num_wanted - len(text))
        return [(t + self._wrong(first + i)) % VOCAB for i, t in enumerate(text)]


WRONG: dict[str, Callable[[int], bool]] = {
    "right": lambda i: False,
    "wrong": lambda i: True,
    "some wrong": lambda i: i % 4 == 2,
}


def _open(sid: int = 1, prompt: tuple[int, ...] = PROMPT, **changes: Any) -> OpenSequence:
    params = SamplingParams(**{"max_tokens": 20, "seed": 7 + sid, **changes})
    return OpenSequence(sid, prompt, len(prompt), params, LOOKAHEAD)


def _run(
    opens: Sequence[OpenSequence],
    make: Callable[[], Drafter] | None = None,
    *,
    eos: tuple[int, ...] = (EOS,),
    model: LanguageModel | None = None,
) -> Driver:
    hooked = HookedModel(model or paged("llama"))
    blocks = BlockManager(128, 16)
    driver = Driver(TargetEngine(hooked, blocks, eos_token_ids=eos), hooked, make, Script())
    driver.run(opens)
    blocks.check_integrity()
    assert blocks.num_free == 128
    counts = driver.counts
    assert counts["drafted"] == counts["tested"] + counts["stale"]
    return driver


@cache
def _text(o: OpenSequence, eos: tuple[int, ...] = (EOS,)) -> list[int]:
    """Alone, without a draft."""
    return _run([o], eos=eos).texts[o.sequence_id]


def _drafted(o: OpenSequence, kind: str, eos: tuple[int, ...] = (EOS,)) -> Driver:
    """With drafts that know the undrafted text; the answer must be the same."""
    texts = {o.sequence_id: _text(o, eos)}
    driver = _run([o], lambda: Knowing(texts, WRONG[kind]), eos=eos)
    assert driver.texts == texts
    return driver


# -- lengths ---------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("max_tokens", range(1, 21))
def test_max_tokens_to_the_token(max_tokens: int, kind: str, temperature: float) -> None:
    o = _open(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
    driver = _drafted(o, kind)
    counts, last = driver.counts, driver.verdicts[1][-1]
    assert len(driver.texts[1]) == max_tokens
    assert last.finish_reason is FinishReason.LENGTH
    assert [v.finish_reason for v in driver.verdicts[1][:-1]] == [None] * (counts["steps"] - 1)
    if kind == "right":
        assert counts["steps"] == -(-max_tokens // (LOOKAHEAD + 1))
        assert counts["accepted"] == counts["tested"] == max_tokens - counts["steps"]
    if kind == "wrong":
        assert counts["accepted"] == 0
        assert counts["steps"] == max_tokens
        assert counts["tested"] == max_tokens - 1  # the last is never drafted


@pytest.mark.parametrize("short_by", [1, 2, 9])
@pytest.mark.parametrize("kind", ["right", "wrong"])
def test_prompts_up_to_the_context(short_by: int, kind: str) -> None:
    """One token short of the context there is room for one, with or without a draft for it."""
    rng = np.random.default_rng(3)
    prompt = tuple(rng.integers(2, VOCAB, CONTEXT - short_by).tolist())
    o = _open(prompt=prompt, temperature=0.0, ignore_eos=True)
    text = _text(o)
    assert len(text) == short_by
    guesses = {1: [0] * (len(prompt) - len(PROMPT)) + text}
    driver = _run([o], lambda: Knowing(guesses, WRONG[kind]))
    assert driver.texts[1] == text
    assert driver.verdicts[1][-1].finish_reason is FinishReason.LENGTH
    assert 0 < driver.counts["tested"] <= short_by
    assert (driver.counts["accepted"] > 0) == (kind == "right")


@pytest.mark.parametrize("num", [CONTEXT, CONTEXT + 1])
def test_prompts_of_the_context_and_above_are_refused(num: int) -> None:
    engine = TargetEngine(paged("llama"), BlockManager(128, 16))
    engine.submit(_open(prompt=(5,) * num))
    engine.submit(_open(2, max_tokens=1))
    refused, mate = engine.step().verdicts
    assert refused.error is not None
    assert (refused.error.code, refused.error.field) == (INVALID, "input")
    assert len(mate.token_ids) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("token", [0, EOS, VOCAB - 1])
def test_prompts_of_one_token(token: int, temperature: float) -> None:
    o = _open(prompt=(token,), temperature=temperature, ignore_eos=True)
    own = lambda: ModelDrafter(paged("llama", "draft"), BlockManager(64, 16))  # noqa: E731
    assert _run([o], own).texts[1] == _text(o)
    assert len(_text(o)) == 20


# -- ends of texts ---------------------------------------------------------------------


def _first_at(index: int) -> tuple[OpenSequence, int]:
    """A text whose token at an index is new to it, and that token."""
    for seed in range(100):
        o = _open(temperature=2.0, seed=seed, ignore_eos=True)
        if (text := _text(o))[index] not in text[:index]:
            return o, text[index]
    raise AssertionError("no such text")


# Of a text of 20 and runs of 8 + 1: inside the first, its last draft, its bonus, the first and
# an inner one of the second, and the very last token.
@pytest.mark.parametrize("index", [0, 3, 7, 8, 9, 12, 19])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("ends_by", ["eos", "stop id"])
def test_an_end_is_cut_to_the_token(ends_by: str, kind: str, index: int) -> None:
    o, token = _first_at(index)
    whole = _text(o)
    changes: dict[str, Any] = {"ignore_eos": False}
    changes |= {"stop_token_ids": (token,)} if ends_by == "stop id" else {}
    eos = (token,) if ends_by == "eos" else ()
    o = replace(o, sampling=replace(o.sampling, **changes))
    # The draft knows nothing of the end, and guesses on.
    driver = _run([o], lambda: Knowing({1: whole}, WRONG[kind]), eos=eos)
    assert driver.texts[1] == whole[: index + 1]
    assert driver.verdicts[1][-1].finish_reason is FinishReason.STOP_TOKEN
    counts = driver.counts
    assert counts["accepted"] + counts["steps"] >= index + 1
    if kind == "right":
        assert counts["tested"] == counts["accepted"]
        undrafted = (8, 17, 19)  # two bonus tokens and the last that may be
        assert counts["tested"] == index + 1 - sum(i <= index for i in undrafted)


@pytest.mark.parametrize("end", ["eos", "stop id"])
@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("min_tokens", [0, 1, 5, 8, 9, 13, 19])
def test_min_tokens_holds_an_eager_end_back(min_tokens: int, kind: str, end: str) -> None:
    """The end is the likeliest token at every position: it comes as soon as it may."""
    eager: dict[str, Any] = {"logit_bias": ((EOS, 100.0),), "min_tokens": min_tokens}
    if end == "stop id":
        eager |= {"stop_token_ids": (EOS,), "ignore_eos": True}
    for temperature in (0.0, 1.0):
        driver = _drafted(_open(temperature=temperature, **eager), kind)
        text = driver.texts[1]
        assert text.index(EOS) == len(text) - 1 == min_tokens
        assert driver.verdicts[1][-1].finish_reason is FinishReason.STOP_TOKEN


@pytest.mark.parametrize("kind", WRONG)
def test_min_tokens_may_be_all_of_them(kind: str) -> None:
    o = _open(logit_bias=((EOS, 100.0),), min_tokens=20, max_tokens=20)
    driver = _drafted(o, kind)
    assert len(driver.texts[1]) == 20
    assert EOS not in driver.texts[1]
    assert driver.verdicts[1][-1].finish_reason is FinishReason.LENGTH


def test_where_eos_is_ignored_min_tokens_does_not_forbid_it() -> None:
    o = _open(logit_bias=((EOS, 100.0),), min_tokens=5, ignore_eos=True)
    assert _text(o) == [EOS] * 20


def test_tokens_decided_before_a_resumption_are_output() -> None:
    """They count for min_tokens and for penalties: the text goes on as if nothing had been."""
    o = _open(
        temperature=1.0,
        min_tokens=6,
        logit_bias=((EOS, 100.0),),
        frequency_penalty=1.0,
        presence_penalty=0.5,
    )
    text = _text(o)
    assert len(text) == 7
    for num in (1, 4, 6):
        assert _text(replace(o, token_ids=PROMPT + tuple(text[:num]))) == text[num:]


# -- penalties and heat ----------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_frequency_penalty_breaks_a_loop(temperature: float) -> None:
    """Drafted by the loop's own continuation, by a model that is penalised alike, and not."""
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table[range(12), [1 + i % 4 for i in range(12)]] += 9.0  # 1, 2, 3, 4, 1, 2, ...
    model = TableModel(table[None])
    text_of: dict[str, Any] = {"prompt": (1, 2, 3), "max_tokens": 40, "ignore_eos": True}
    looping = _open(temperature=0.0, **text_of)
    broken = _open(temperature=temperature, frequency_penalty=1.5, **text_of)
    loop = _run([looping], model=model).texts[1]
    assert loop == [4, 1, 2, 3] * 10
    text = _run([broken], model=model).texts[1]
    same = next(i for i in range(40) if text[i] != loop[i])
    assert temperature or 12 <= same < 36  # it takes rounds until a token has lost its lead
    assert len(set(text)) > 6
    drafters: list[Callable[[], Drafter]] = [
        lambda: NgramDrafter(1, 3),
        lambda: ModelDrafter(model, BlockManager(64, 16)),
    ]
    for make in drafters:
        driver = _run([broken], make, model=model)
        assert driver.texts[1] == text
        assert driver.counts["tested"] > 0
    assert driver.counts["accepted"] == driver.counts["tested"]  # by the model that knows


def test_heats_do_not_mix() -> None:
    """Temperatures 0, 1e-7 (greedy as well), 1e-3 and 2 in one batch; each as if alone."""
    heats = {1: 0.0, 2: 1e-7, 3: 1e-3, 4: 2.0}
    opens = [_open(sid, temperature=t, seed=3, ignore_eos=True) for sid, t in heats.items()]
    texts = {o.sequence_id: _text(o) for o in opens}
    assert texts[1] == texts[2] != texts[4]
    assert opens[1].sampling.rule is Rule.GREEDY
    for make in (None, lambda: Knowing(texts, WRONG["some wrong"])):
        assert _run(opens, make).texts == texts


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["right", "some wrong", "own"])
def test_every_parameter_in_one_batch(kind: str, temperature: float) -> None:
    """Each sequence has its own; each text is as alone and undrafted."""
    shared = {"temperature": temperature, "seed": 11}
    opens = [_open(i, **{**shared, **kwargs}) for i, kwargs in enumerate(VARIANTS.values())]
    texts = {o.sequence_id: _text(o) for o in opens}
    assert len({tuple(text) for text in texts.values()}) > len(texts) / 2

    def make() -> Drafter:
        if kind == "own":
            blocks = BlockManager(128, 16)
            return ModelDrafter(paged("llama", "draft"), blocks, eos_token_ids=(EOS,))
        return Knowing(texts, WRONG[kind])

    driver = _run(opens, make)
    assert driver.texts == texts
    if kind != "some wrong":
        assert driver.counts["accepted"] == driver.counts["tested"] > 0
