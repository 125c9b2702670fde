"""transformers' `generate` or `generate_batch` in a process of its own."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    GenerationConfig,
    StoppingCriteria,
)
from transformers.utils import logging

from tests.benchmarks.peers.protocol import Answer, serve, take_stdout

PAGE, ROWS = 256, 512


class _FirstToken(StoppingCriteria):  # type: ignore[misc]  # transformers' types are not read
    """Never stops anything; notes when it was first asked."""

    def __init__(self) -> None:
        self.at = 0.0

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        self.at = self.at or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def padded(model: Any, prompts: list[list[int]], num_tokens: int) -> Answer:
    """`generate`: one batch, padded on the left."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    first, began = _FirstToken(), time.perf_counter()
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=num_tokens,
        pad_token_id=0,
        stopping_criteria=[first],
    )
    return [first.at - began] * len(prompts), out[:, width:].tolist()


def continuous(model: Any, prompts: list[list[int]], num_tokens: int) -> Answer:
    """`generate_batch`: continuous batching over paged memory."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=num_tokens, eos_token_id=-1, pad_token_id=0
    )
    # By itself it takes, and clears, nearly all memory at every call.
    pages = sum(-(-(len(p) + num_tokens) // PAGE) for p in prompts)
    paging = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=pages + 1, max_batch_tokens=ROWS, allow_block_sharing=False
    )
    began = time.perf_counter()
    found = model.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=paging,
        record_timestamps=True,
        warmup=False,
    )
    outs = sorted(found.values(), key=lambda o: int(o.request_id.rpartition("_")[2]))
    assert [o.prompt_ids for o in outs] == prompts, "the answers are not in order"
    return [o.timestamps[0] - began for o in outs], [o.generated_tokens for o in outs]


def main() -> None:
    out = take_stdout()
    folder, kind = sys.argv[1:3]
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None  # nothing ends a text but its length
    run = padded if kind == "generate" else continuous
    serve(lambda prompts, num_tokens: run(model, prompts, num_tokens), out)


if __name__ == "__main__":
    main()
