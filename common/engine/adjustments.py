"""What a text so far makes of the next logits: logit_bias, penalties, min_tokens.

The first part of the sampler, before `sampling.py`: greedy rows get it too. A row is changed
at a few ids only, so a step pays for the distinct tokens of its text and never for the
vocabulary; and what is kept of a text grows with it, so a step never reads it anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.errors import InvalidRequestError
from common.types import FloatArray, IntArray, SamplingParams, Tokens

# A token id that may have to change; unused slots are all zeros, which changes nothing.
_SLOT = np.dtype(
    [
        ("id", np.int64),
        ("bias", np.float64),
        ("in_prompt", bool),
        ("is_end", bool),
        ("num_output", np.int64),
    ]
)


class RowEdit(NamedTuple):
    """What changes in one row of logits; every id is there once."""

    ids: IntArray  # [N]
    bias: FloatArray  # [N] added
    factor: FloatArray  # [N] divides what is positive then, multiplies what is not
    taken: FloatArray  # [N] subtracted last; infinite: forbidden


class Adjustments:
    """The row edits of one sequence; follows its text, which only changes at its end.

    repetition_penalty counts prompt and output, presence and frequency count output alone,
    as vLLM's users know them. Output is all that comes after the prompt, whoever decided it.
    """

    def __init__(self, params: SamplingParams, prompt: Tokens, end_ids: Collection[int]) -> None:
        p = self._params = params
        self._lasting = has_penalties(p) or bool(p.logit_bias)
        self._num_prompt = len(prompt)
        self._output: list[int] = []
        bias = dict(p.logit_bias)
        seen = set(prompt) if p.repetition_penalty != 1 else set()
        ends = set(end_ids) if p.min_tokens else set()
        ids = list(dict.fromkeys((*bias, *ends, *seen)))
        self._slot_of = {t: i for i, t in enumerate(ids)}
        rows = [(t, bias.get(t, 0.0), t in seen, t in ends, 0) for t in ids]
        self._slots = np.array(rows, _SLOT)

    @classmethod
    def of(
        cls, params: SamplingParams, token_ids: Tokens, num_prompt: int, end_ids: Collection[int]
    ) -> Adjustments | None:
        """For a text whose first num_prompt tokens are its prompt; None: nothing ever changes.

        end_ids: see `end_ids_of`.
        """
        if not (has_penalties(params) or params.logit_bias or (params.min_tokens and end_ids)):
            return None
        adjustments = cls(params, token_ids[:num_prompt], end_ids)
        adjustments.append(token_ids[num_prompt:])
        return adjustments

    def append(self, tokens: Iterable[int]) -> None:
        """Take in tokens at the end of the text."""
        for token in tokens:
            slot = self._slot_of.setdefault(token, len(self._slot_of))
            if slot == len(self._slots):  # room for as many again
                more = np.zeros(max(16, slot), _SLOT)
                self._slots = np.concatenate([self._slots, more])
            self._slots["id"][slot] = token
            self._slots["num_output"][slot] += 1
            self._output.append(token)

    def truncate(self, num_tokens: int) -> None:
        """Forget what comes after the first num_tokens of the text, at most all its output."""
        keep = num_tokens - self._num_prompt
        assert keep >= 0, "a prompt stays"
        for token in self._output[keep:]:
            self._slots["num_output"][self._slot_of[token]] -= 1
        del self._output[keep:]

    def edit(self) -> RowEdit | None:
        """What changes for the token after the text; None: nothing."""
        p = self._params
        held = len(self._output) < p.min_tokens
        if not (self._lasting or held):
            return None
        slots = self._slots
        bias, num = slots["bias"], slots["num_output"]
        taken = p.presence_penalty * (num > 0) + p.frequency_penalty * num
        if held:
            taken[slots["is_end"]] = np.inf
        factor = np.where(slots["in_prompt"] | (num > 0), p.repetition_penalty, 1.0)
        which = np.flatnonzero((bias != 0) | (factor != 1) | (taken != 0))
        if which.size == 0:
            return None
        return RowEdit(slots["id"][which], bias[which], factor[which], taken[which])

    def edits_along(self, ahead: list[int]) -> list[RowEdit | None]:
        """What changes after the text, and after each more of the tokens ahead. 1 + len(ahead)"""
        num_tokens = self._num_prompt + len(self._output)
        edits = [self.edit()]
        for token in ahead:
            self.append((token,))
            edits.append(self.edit())
        self.truncate(num_tokens)
        return edits


def has_penalties(params: SamplingParams) -> bool:
    """Whether what was said weighs on what is said next."""
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def end_ids_of(params: SamplingParams, eos: Iterable[int]) -> frozenset[int]:
    """Tokens that end a text, and that min_tokens forbids before it is long enough."""
    return frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos)


def check_ids(params: SamplingParams, end_ids: Collection[int], vocab_size: int) -> None:
    """Raises `InvalidRequestError` for ids that the model lacks, or if min_tokens leaves none."""
    named = [(t, f"logit_bias[{t}]") for t, _ in params.logit_bias]
    named += [(t, f"stop_token_ids[{i}]") for i, t in enumerate(params.stop_token_ids)]
    for token, field in named:
        if not 0 <= token < vocab_size:
            raise InvalidRequestError(
                f"is for token {token}, must be below the vocabulary size of {vocab_size}",
                field=f"sampling.{field}",
            )
    if params.min_tokens and len(end_ids) >= vocab_size:
        raise InvalidRequestError(
            f"is {params.min_tokens}, must be 0 where every token of the vocabulary ends the text",
            field="sampling.min_tokens",
        )


def adjust_(x: Tensor, edits: Mapping[int, RowEdit]) -> None:
    """Change logits in place, in the rows that edits name; each by its own edit alone. [R, V]"""
    if edits:
        with torch.inference_mode():  # a model's logits may not be written to outside
            _adjust_(x, edits)


def _adjust_(x: Tensor, edits: Mapping[int, RowEdit]) -> None:
    num = [len(e.ids) for e in edits.values()]
    ids, bias, factor, taken = map(np.concatenate, zip(*edits.values(), strict=True))
    rows = np.repeat(np.fromiter(edits, np.int64), num)
    index = torch.from_numpy(rows).to(x.device), torch.from_numpy(ids).to(x.device)
    by = torch.from_numpy(factor).to(x)
    z = x[index] + torch.from_numpy(bias).to(x)
    x[index] = torch.where(z > 0, z / by, z * by) - torch.from_numpy(taken).to(x)
