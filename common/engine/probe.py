"""Questions put to a model at load: can it be served exactly, and on what terms?"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from common.engine.batch import Span, pack
from common.engine.block_manager import BlockManager
from common.engine.paged_model import LanguageModel
from common.errors import ConfigurationError

_PROBE_NAME = "tandem_probe"
_KNOWN = {
    "dropout",
    "is_causal",
    "position_ids",
    "tandem_seen",
    "scaling",
}
# What transformers passes along without asking attention to heed it.
_KNOWN |= {"use_cache", "output_attentions", "output_hidden_states", "cache_position"}
NUM_TOKENS = 24  # of the text that every cache must hold
NUM_INVARIANT_TOKENS = 96  # of the text that row invariance is checked over, if it fits


class LayerCall(NamedTuple):
    """What a layer gives its attention."""

    num_kv_heads: int
    head_dim: int
    value_dim: int
    sliding_window: int | None
    softcap: float | None = None


@torch.inference_mode()
def probe(model: Any) -> tuple[Tensor, list[LayerCall]]:
    """Logits of a short text through torch's own attention, and every layer's call.

    Returns ([NUM_TOKENS, V], one entry a layer). Raises `ConfigurationError` for a model whose
    attention can't be replaced, is not called once a layer, or takes arguments that change
    its mathematics in an unknown way.
    """
    name = type(model).__name__
    if not getattr(model, "_supports_attention_backend", False):
        raise ConfigurationError(f"{name} has no replaceable attention", field="--model")
    ids = probe_tokens(model.config.get_text_config().vocab_size).to(model.device)
    expected: Tensor = model(input_ids=ids[None], use_cache=False).logits[0]
    seen: dict[int, LayerCall] = {}
    model.set_attn_implementation(_PROBE_NAME)
    got: Tensor = model(
        input_ids=ids[None],
        position_ids=torch.arange(NUM_TOKENS, device=model.device)[None],
        use_cache=False,
        logits_to_keep=torch.tensor([NUM_TOKENS - 1], device=model.device),
        tandem_seen=seen,
    ).logits
    num_layers = model.config.get_text_config().num_hidden_layers
    if sorted(seen) != list(range(num_layers)):
        raise ConfigurationError(
            f"{name} called its attention in {len(seen)} of {num_layers} layers", field="--model"
        )
    if got.shape[1] != 1:
        raise ConfigurationError(f"{name} does not heed logits_to_keep", field="--model")
    return expected, [seen[i] for i in range(num_layers)]


def _probing_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    tandem_seen: dict[int, LayerCall] | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, None]:
    layer: Any = module.layer_idx
    name = type(module).__name__
    unknown = {k for k, v in arguments.items() if v is not None} - _KNOWN
    if unknown:
        raise ConfigurationError(
            f"{name} gives its attention {', '.join(sorted(unknown))}, unknown here",
            field="--model",
        )
    if tandem_seen is None:
        raise ConfigurationError(
            f"{name} does not pass keyword arguments on to its attention", field="--model"
        )
    if layer in tandem_seen:
        raise ConfigurationError(f"{name} calls layer {layer} twice", field="--model")
    tandem_seen[layer] = LayerCall(
        key.shape[1], key.shape[3], value.shape[3], sliding_window, softcap
    )
    shape = (query.shape[0], query.shape[2], query.shape[1], value.shape[3])
    return query.new_zeros(shape), None


AttentionInterface.register(_PROBE_NAME, _probing_attention)


def probe_tokens(vocab_size: int, num_tokens: int = NUM_TOKENS) -> Tensor:
    """A fixed text of varied ids. [num_tokens]"""
    return torch.arange(1, num_tokens + 1) * 7919 % vocab_size


def paged_logits(
    model: LanguageModel, block_size: int, pieces: tuple[int, ...] = (NUM_TOKENS,)
) -> Tensor:
    """Logits of the probe's text through the paged cache, in passes of so many rows each.

    [sum(pieces), V]
    """
    num_tokens = sum(pieces)
    ids = probe_tokens(model.vocab_size, num_tokens).tolist()
    blocks = BlockManager(-(-num_tokens // block_size), block_size)
    blocks.open(0)
    rows, start = [], 0
    for num in pieces:
        blocks.reserve(0, start + num)
        span = Span(0, start, ids[start : start + num], num)
        rows.append(model.forward(pack([span], blocks, model.device)).logits)
        start += num
    return torch.cat(rows)


def is_row_invariant(model: LanguageModel, block_size: int, num_tokens: int = NUM_TOKENS) -> bool:
    """Whether a row's logits came out the same to the bit in passes of 1, 3, 8, 16, 33 and all.

    Over a text of so many tokens: libraries change their ways at some number of rows, which a
    short one may not reach. A check, not a proof; where it fails, drafting may change near-ties.
    """
    whole = paged_logits(model, block_size, (num_tokens,))

    def split(size: int, times: int) -> tuple[int, ...]:  # and what is left in one pass
        sizes = [size] * min(times, num_tokens // size)
        rest = num_tokens - sum(sizes)
        return (*sizes, rest) if rest else tuple(sizes)

    splits = (split(*s) for s in ((1, NUM_TOKENS), (3, 8), (8, 3), (16, 6), (33, 2)))
    return all(torch.equal(paged_logits(model, block_size, s), whole) for s in splits)
