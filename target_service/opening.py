"""What a sequence must be like to be opened."""

from __future__ import annotations

from collections.abc import Iterable

from common.engine.adjustments import check_ids, end_ids_of
from common.engine.paged_model import LanguageModel
from common.errors import CapacityError, InvalidRequestError
from common.types import OpenSequence


def check_open(o: OpenSequence, model: LanguageModel, eos: Iterable[int], capacity: int) -> None:
    """Raise `TandemError`, naming the field, for what can't be served.

    eos are the model's own end-of-sequence ids, capacity is the KV cache's in slots.
    """
    num, context_len = len(o.token_ids), model.context_len
    if num == 0:
        raise InvalidRequestError("is empty, must hold one token or more", field="input")
    if num >= context_len:
        raise InvalidRequestError(
            f"has {num} tokens, must leave room for one more within the context of {context_len}",
            field="input",
        )
    if not all(0 <= t < model.vocab_size for t in o.token_ids):
        raise InvalidRequestError(
            f"has token ids of {model.vocab_size} (the vocabulary) or above", field="input"
        )
    if not 1 <= o.num_prompt <= num:
        raise InvalidRequestError(
            f"is {o.num_prompt}, must be 1 to {num}, the number of token ids", field="num_prompt"
        )
    if num - o.num_prompt >= o.sampling.max_tokens:
        raise InvalidRequestError(
            f"is {o.sampling.max_tokens}, and as many are decided already",
            field="sampling.max_tokens",
        )
    check_ids(o.sampling, end_ids_of(o.sampling, eos), model.vocab_size)
    longest = min(o.num_prompt + o.sampling.max_tokens, context_len) - 1
    if longest > capacity:
        raise CapacityError(
            f"prompt and max_tokens need {longest} slots of the KV cache, which has {capacity};"
            " ask for less, or raise --num-kv-tokens",
            field="sampling.max_tokens",
        )
