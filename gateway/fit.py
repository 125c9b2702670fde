"""Who fits whom: drafts and targets, and targets that may stand in for each other."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ConfigurationError
from common.tokenizer import Tokenizer
from common.types import ModelInfo

DECISIVE = (
    "weights_fingerprint",
    "noise_version",
    "tokenizer_fingerprint",
    "eos_token_ids",
    "context_len",
)
"""Fields of a model that decide its answers. Its name is none of them."""


@dataclass(frozen=True)
class Served:
    """A model that can be asked for, and its tokenizer."""

    model: ModelInfo
    tokenizer: Tokenizer


def difference(model: ModelInfo, other: ModelInfo) -> str:
    """Why a model may answer differently from another one; empty if it may not."""
    for name in DECISIVE:
        one, two = getattr(model, name), getattr(other, name)
        if one != two:
            return f"its {name} is {one!r}, not {two!r}"
    return ""


def check_fit(draft: ModelInfo, target: ModelInfo, num_ids: int) -> None:
    """Raises `ConfigurationError` if a draft's guesses would mean something else.

    num_ids is the size of the target's tokenizer; models often pad their logits beyond it.
    """
    if draft.vocab_size == 0:
        return  # it only repeats ids that it has seen
    if not draft.tokenizer_fingerprint or (
        draft.tokenizer_fingerprint != target.tokenizer_fingerprint
    ):
        raise ConfigurationError(
            f'drafts speak another vocabulary: "{draft.name}" has tokenizer'
            f' "{draft.tokenizer_fingerprint}", the target "{target.name}" has'
            f' "{target.tokenizer_fingerprint}"'
        )
    if draft.vocab_size < min(target.vocab_size, num_ids):
        raise ConfigurationError(
            f'the draft "{draft.name}" knows {draft.vocab_size} token ids,'
            f" the tokenizer has {num_ids}"
        )
    if draft.noise_version and draft.noise_version != target.noise_version:
        raise ConfigurationError(
            f'drafts draw other noise: "{draft.noise_version}", the target "{target.noise_version}"'
        )


def fits(draft: ModelInfo | None, served: Served | None) -> bool:
    """Whether a draft may guess for a model."""
    if draft is None or served is None:
        return False
    try:
        check_fit(draft, served.model, served.tokenizer.num_ids)
    except ConfigurationError:
        return False
    return True


def checked_tokenizer(model: ModelInfo, files: dict[str, bytes]) -> Tokenizer:
    """The tokenizer in a target's files; raises `ConfigurationError` if its model needs another."""
    tokenizer = Tokenizer(files)
    if model.tokenizer_fingerprint not in ("", tokenizer.fingerprint):
        raise ConfigurationError(
            f"the target's tokenizer files are {tokenizer.fingerprint},"
            f" its model needs {model.tokenizer_fingerprint}"
        )
    return tokenizer
