"""Sampling parameters, one variant for each that shapes a text, for tests to go through."""

from __future__ import annotations

from typing import Any

from tests.models import VOCAB

EOS = 1  # of the models in `tests/models.py`

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"logit_bias": ((3, 4.0), (7, -100.0), (VOCAB - 1, 1.5))},
    "repetition": {"repetition_penalty": 1.3},
    "repetition below 1": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.9},
    "frequency below 0": {"frequency_penalty": -0.7},
    "min_tokens": {"min_tokens": 9, "ignore_eos": False, "logit_bias": ((EOS, 6.0),)},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "logprobs": {"num_logprobs": 5},
    "ignore_eos": {"ignore_eos": True, "logit_bias": ((EOS, 4.0),)},
    "stop ids": {"stop_token_ids": (11, 29)},
    "mixed": {
        "logit_bias": ((2, 2.0), (EOS, 3.0)),
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "min_tokens": 5,
        "stop_token_ids": (23,),
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
        "num_logprobs": 2,
    },
}
"""Name -> keyword arguments of `SamplingParams`. Texts run over EOS only where ignore_eos says."""

HISTORY = ("repetition", "repetition below 1", "presence", "frequency", "min_tokens", "mixed")
"""Variants under which p depends on the text before, and so on the draft tokens of a run."""
