"""A decoder step in C++: all layers of a common pre-norm transformer in one call, bfloat16.

Takes a loaded transformers model of the llama kind (llama, mistral, qwen2, qwen3, smollm) and
packs its weights, quantised ones too; see `kernels.cpp`. Anything else runs through its own modules
(`PagedModel`).
A row's logits are the same bits in any batch (unless that is given up for speed) and with any
number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from common.engine.batch import Output, RaggedBatch
from common.engine.native.build import library
from common.engine.native.packing import DEPTH, FORMATS, TILE, format_of, pack, weight_of
from common.engine.native.pages import HugePages

MAX_HEAD_DIM = 256


class UnsupportedError(Exception):
    """Why a model or a machine can't have the native step."""


def _struct(name: str, **fields: Any) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_int, _float, _pointer = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p
_Layer = _struct(
    "_Layer",
    **dict.fromkeys(("qkv", "out", "gate_up", "down"), _pointer),
    **dict.fromkeys(("input_norm", "post_norm", "qkv_bias", "q_norm", "k_norm"), _pointer),
    **dict.fromkeys(("keys", "values"), _pointer),
    window=_int,
)
_Config = _struct(
    "_Config",
    **dict.fromkeys(("num_layers", "hidden", "num_heads", "num_kv_heads", "head_dim"), _int),
    **dict.fromkeys(("intermediate", "vocab", "block_size"), _int),
    **dict.fromkeys(("num_threads", "use_amx", "batch_dependent", "format", "head_format"), _int),
    **dict.fromkeys(("epsilon", "scale"), _float),
    **dict.fromkeys(("embedding", "lm_head", "final_norm", "cosines", "sines"), _pointer),
)
_Batch = _struct(
    "_Batch",
    **dict.fromkeys(("num_rows", "num_sequences", "table_width", "num_logits"), _int),
    **dict.fromkeys(("token_ids", "positions", "slots", "query_start"), _pointer),
    **dict.fromkeys(("context_len", "block_table", "logit_rows", "logits", "likeliest"), _pointer),
)


class NativeModel:
    """Runs ragged batches natively; owns packed weights and KV cache. One thread uses it.

    windows [num layers] are the positions that a row sees, 0: all. Raises `UnsupportedError` for
    a model or a machine that can't.
    """

    backend = "native"

    def __init__(
        self,
        model: Any,
        *,
        windows: Sequence[int],
        num_blocks: int,
        block_size: int,
        num_threads: int,
        cache_dir: str,
        batch_dependent: bool = False,
        amx: bool = True,
    ) -> None:
        loaded, reason = library(cache_dir)
        if loaded is None:
            raise UnsupportedError(reason)
        self._library = loaded
        self._library.tandem_create.restype = _pointer
        self._library.tandem_forward.argtypes = [_pointer, _pointer]
        self._library.tandem_destroy.argtypes = [_pointer]
        self.device = torch.device("cpu")
        self.uses_amx = amx and bool(self._library.tandem_request_amx())
        config = model.config
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        self.context_len = int(config.max_position_embeddings)
        self._memory = HugePages()
        self._kept: list[Tensor] = []  # what the C++ side points to
        self._pools: list[Tensor] = []  # of those keys and values, by block
        _check(model, block_size)
        head = weight_of(model.get_output_embeddings())
        kind = format_of(weight_of(model.model.layers[0].mlp.down_proj))
        step = "native-amx" if self.uses_amx else "native-avx512"
        self.features = (step,) if kind == "bfloat16" else (step, kind)
        head_dim = model.model.layers[0].self_attn.head_dim
        num_kv_heads = config.num_key_value_heads
        padded_dim = -(-head_dim // DEPTH) * DEPTH
        layers = [
            self._layer(layer, window, num_blocks, block_size * num_kv_heads * padded_dim)
            for layer, window in zip(model.model.layers, windows, strict=True)
        ]
        cosines, sines = _rotary(model, self.context_len)
        self._config = _Config(
            num_layers=len(layers),
            hidden=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate=config.intermediate_size,
            vocab=self.vocab_size,
            block_size=block_size,
            num_threads=num_threads,
            use_amx=self.uses_amx,
            batch_dependent=batch_dependent,
            format=FORMATS.index(kind),
            head_format=FORMATS.index(format_of(head)),
            epsilon=config.rms_norm_eps,
            scale=model.model.layers[0].self_attn.scaling,
            embedding=self._keep(model.get_input_embeddings().weight.to(torch.bfloat16)),
            lm_head=self._keep(pack(head)),
            final_norm=self._keep(model.model.norm.weight.float()),
            cosines=self._keep(cosines),
            sines=self._keep(sines),
        )
        array = (_Layer * len(layers))(*layers)
        self._handle = self._library.tandem_create(ctypes.byref(self._config), array)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.tandem_destroy(handle)

    def forward(self, batch: RaggedBatch) -> Output:
        """See `LanguageModel`; in float32, with the likeliest."""
        num_logits = batch.logit_rows.shape[0]
        logits = np.empty((num_logits, self.vocab_size), np.float32)
        likeliest = np.empty(num_logits, np.int64)
        view = _Batch(
            num_rows=batch.token_ids.shape[0],
            num_sequences=batch.num_sequences,
            table_width=batch.block_table.shape[1],
            num_logits=num_logits,
            token_ids=batch.token_ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            query_start=batch.query_start.ctypes.data,
            context_len=batch.context_len.ctypes.data,
            block_table=batch.block_table.data_ptr(),
            logit_rows=batch.logit_rows.data_ptr(),
            logits=logits.ctypes.data,
            likeliest=likeliest.ctypes.data,
        )
        self._library.tandem_forward(self._handle, ctypes.byref(view))  # without the GIL
        return Output(torch.from_numpy(logits), torch.from_numpy(likeliest))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """See `LanguageModel`."""
        for pool in self._pools:
            for source, target in copies:
                pool[target] = pool[source]

    def _pool(self, num_blocks: int, size: int) -> int | None:
        """Keys or values of one layer, a block's in one piece: sixteen slots of each KV head."""
        self._pools.append(self._memory.zeros(num_blocks, size, dtype=torch.bfloat16))
        return self._pools[-1].data_ptr()

    def _keep(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(self._memory.copy(tensor.detach()))
        return self._kept[-1].data_ptr()

    def _layer(self, layer: Any, window: int, num_blocks: int, block_len: int) -> Any:
        attention, mlp = layer.self_attn, layer.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None
        if projections[0].bias is not None:
            bias = torch.cat([p.bias for p in projections]).float()
        # Gate and up take turns, so that a thread has both of what it multiplies.
        gate_up = torch.stack([pack(weight_of(m)) for m in (mlp.gate_proj, mlp.up_proj)], dim=1)

        def norm(name: str) -> int | None:
            module = getattr(attention, name, None)
            return self._keep(module.weight.float() if module is not None else None)

        return _Layer(
            qkv=self._keep(pack(weight_of(*projections))),
            out=self._keep(pack(weight_of(attention.o_proj))),
            gate_up=self._keep(gate_up),
            down=self._keep(pack(weight_of(mlp.down_proj))),
            input_norm=self._keep(layer.input_layernorm.weight.float()),
            post_norm=self._keep(layer.post_attention_layernorm.weight.float()),
            qkv_bias=self._keep(bias),
            q_norm=norm("q_norm"),
            k_norm=norm("k_norm"),
            keys=self._pool(num_blocks, block_len),
            values=self._pool(num_blocks, block_len),
            window=window,
        )


def _check(model: Any, block_size: int) -> None:
    """Raises `UnsupportedError` unless the model is built as the kernels expect.

    What this can't see, the loader's comparison of logits does.
    """
    config = model.config
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None or model.device.type != "cpu" or model.dtype != torch.bfloat16:
        raise UnsupportedError("not a bfloat16 decoder on CPU")
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "post_attention_layernorm")
    names = {name for name, _ in layers[0].named_modules()}
    if not set(parts) <= names or getattr(config, "hidden_act", "") != "silu":
        raise UnsupportedError("not a decoder of the llama kind")
    biased = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    if any(layers[0].get_submodule(name).bias is not None for name in biased):
        raise UnsupportedError("it has biases where the native step has none")
    head_dim = layers[0].self_attn.head_dim
    if block_size % TILE or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise UnsupportedError(f"blocks of {block_size} slots or heads of {head_dim} don't fit")
    if config.num_attention_heads // config.num_key_value_heads > TILE:
        raise UnsupportedError("too many query heads read one KV head")
    attended = config.num_attention_heads * head_dim
    if any(n % DEPTH for n in (config.hidden_size, config.intermediate_size, attended)):
        raise UnsupportedError(f"its widths are no multiples of {DEPTH}")


@torch.inference_mode()
def _rotary(model: Any, context_len: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position in float32. [context, D / 2] each"""
    probe = torch.zeros(1, 1, 1)
    cosines, sines = model.model.rotary_emb(probe, torch.arange(context_len)[None])
    head_dim = model.model.layers[0].self_attn.head_dim
    if cosines.shape[-1] != head_dim:
        raise UnsupportedError("its rotary embedding covers a part of a head only")
    half = head_dim // 2
    return cosines[0, :, :half].contiguous(), sines[0, :, :half].contiguous()
