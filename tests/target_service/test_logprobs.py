"""Log probabilities of decided tokens: the raw logits', for every token, drafted or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.config import ModelConfig
from common.engine.block_manager import BlockManager
from common.engine.loader import build
from common.engine.paged_model import LanguageModel
from common.types import FinishReason, FloatArray, OpenSequence, SamplingParams, Verdict
from draft_service.drafters import Drafter
from draft_service.drafters.model import ModelDrafter
from target_service.engine import TargetEngine
from target_service.logprobs import Logprobs, logprobs_of
from tests.counting import House, open_sequence, piece
from tests.driver import Driver, HookedModel, Script
from tests.models import transformer
from tests.params import VARIANTS

PROMPT = (5, 17, 40, 8, 17)
DTYPES = {"float32": torch.float32, "float64": torch.float64}
TOLERANCE = {"float32": 1e-4, "float64": 1e-10}


@cache
def _paged(family: str, dtype: str, instance: str) -> LanguageModel:
    return build(transformer(family, DTYPES[dtype]), ModelConfig(num_kv_tokens=2048))[0]


def _teacher(family: str, dtype: str, text: list[int]) -> FloatArray:
    """Log-softmax at every output position, by one plain pass. [N, V]"""
    model = transformer(family, DTYPES[dtype])
    logits = model(input_ids=torch.tensor([[*PROMPT, *text]]), use_cache=False).logits[0]
    log_p: FloatArray = torch.log_softmax(logits, dim=-1).numpy()
    return log_p[len(PROMPT) - 1 : -1]


def _verdicts(
    family: str, dtype: str, drafted: bool, **changes: Any
) -> tuple[list[int], list[Verdict]]:
    params = SamplingParams(**{"max_tokens": 24, "seed": 3, "ignore_eos": True, **changes})
    hooked = HookedModel(_paged(family, dtype, "target"))
    engine = TargetEngine(hooked, BlockManager(64, 16))

    def own() -> Drafter:
        return ModelDrafter(_paged(family, dtype, "draft"), BlockManager(64, 16))

    driver = Driver(engine, hooked, own if drafted else None, Script([0], [3]))
    text = driver.run([OpenSequence(1, PROMPT, len(PROMPT), params, 6 if drafted else 0)])[1]
    assert (driver.counts["accepted"] > 8) == drafted
    return text, driver.verdicts[1]


@pytest.mark.parametrize("drafted", [False, True], ids=["undrafted", "drafted"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("changes", ["logprobs", "mixed"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_equal_a_teacher_forced_pass(
    family: str, changes: str, temperature: float, dtype: str, drafted: bool
) -> None:
    """Also where bias, penalties and filters chose the token: log p before all that."""
    never_ends = {"ignore_eos": True, "stop_token_ids": ()}
    sampling = {**VARIANTS[changes], **never_ends, "temperature": temperature}
    text, verdicts = _verdicts(family, dtype, drafted, **sampling)
    found = [x for v in verdicts for x in v.logprobs]
    tops = [top for v in verdicts for top in v.top_logprobs]
    assert all(len(v.logprobs) == len(v.top_logprobs) == len(v.token_ids) for v in verdicts)
    assert len(found) == len(text) > 0
    log_p, off = _teacher(family, dtype, text), TOLERANCE[dtype]
    np.testing.assert_allclose(found, log_p[np.arange(len(text)), text], atol=off)
    for row, top in zip(log_p, tops, strict=True):
        assert len(top.token_ids) == len(set(top.token_ids)) == sampling["num_logprobs"]
        assert list(top.logprobs) == sorted(top.logprobs, reverse=True)
        best = np.sort(row)[::-1][: len(top.token_ids)]
        np.testing.assert_allclose(top.logprobs, best, atol=off)
        np.testing.assert_allclose(row[list(top.token_ids)], best, atol=2 * off)


@pytest.mark.parametrize(("num", "has_chosen"), [(None, False), (0, True)])
def test_none_or_the_chosen_alone(num: int | None, has_chosen: bool) -> None:
    text, verdicts = _verdicts("llama", "float64", True, num_logprobs=num)
    assert sum(len(v.logprobs) for v in verdicts) == len(text) * has_chosen
    assert all(v.top_logprobs == () for v in verdicts)


def test_asking_for_them_changes_no_text() -> None:
    for temperature in (0.0, 1.0):
        texts = [
            _verdicts("llama", "float64", True, num_logprobs=num, temperature=temperature)[0]
            for num in (None, 0, 20)
        ]
        assert texts[0] == texts[1] == texts[2]


def test_only_those_who_ask_get_them() -> None:
    house = House()
    house.submit(open_sequence(1, num_logprobs=1), open_sequence(2), open_sequence(3))
    house.submit(piece(1, 3, 4, 5, 6), piece(2, 3, 4, 5, 6))
    house.step()
    assert len(house.last[1].logprobs) == len(house.last[1].token_ids) == 4
    assert [top.token_ids for top in house.last[1].top_logprobs] == [(4,), (5,), (6,), (7,)]
    assert house.last[2].logprobs == house.last[3].logprobs == ()


@pytest.mark.parametrize(("stop", "max_tokens"), [(5, 20), (99, 2)])
def test_a_finish_cuts_them_too(stop: int, max_tokens: int) -> None:
    house = House(eos=(stop,))
    house.submit(open_sequence(1, num_logprobs=2, max_tokens=max_tokens), piece(1, 3, 4, 5, 6, 7))
    house.step()
    v = house.last[1]
    assert v.token_ids == (4, 5)
    assert v.finish_reason in (FinishReason.STOP_TOKEN, FinishReason.LENGTH)
    assert len(v.logprobs) == len(v.top_logprobs) == 2


QUARTERS = st.lists(st.integers(-8, 8), min_size=3, max_size=30)


@given(QUARTERS, st.integers(0, 20), st.sampled_from([torch.bfloat16, torch.float32]))
def test_of_equals_the_lower_id_comes_first(
    quarters: list[int], num: int, dtype: torch.dtype
) -> None:
    logits = (torch.tensor(quarters) / 4).to(dtype)
    found = logprobs_of(torch.stack([logits, logits.flip(0)]), [1, 2], num)
    order = sorted(range(len(quarters)), key=lambda i: (-quarters[i], i))[:num]
    log_p = torch.log_softmax(logits.float(), dim=0)
    assert found.chosen[0] == log_p[1].item()
    if num == 0:
        assert found.top == ()
        return
    assert found.top[0].token_ids == tuple(order)
    assert found.top[0].logprobs == tuple(log_p[order].tolist())
    assert found.first(1) == Logprobs(found.chosen[:1], found.top[:1])


def test_a_row_does_not_depend_on_its_run() -> None:
    logits = torch.randn(5, 3000, generator=torch.Generator().manual_seed(1))
    tokens: list[int] = [4, 1, 2999, 0, 77]
    together = logprobs_of(logits, tokens, 7)
    one: Callable[[int], Logprobs] = lambda i: logprobs_of(logits[i : i + 1], tokens[i : i + 1], 7)  # noqa: E731
    assert [one(i).chosen[0] for i in range(5)] == list(together.chosen)
    assert [one(i).top[0] for i in range(5)] == list(together.top)
