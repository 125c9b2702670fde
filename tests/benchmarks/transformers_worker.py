"""transformers' `generate` in a process of its own: a peer for `throughput.py`.

Reads lines of JSON {"prompts": [[ids], ...], "num_tokens": n} and answers each with
{"seconds": s, "token_ids": [[ids], ...]}. Batches are padded on the left, greedy.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    folder, dtype = sys.argv[1:3]
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts, num = job["prompts"], job["num_tokens"]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        began = time.perf_counter()
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=num,
            max_new_tokens=num,
            pad_token_id=0,
        )
        seconds = time.perf_counter() - began
        answer = {"seconds": seconds, "token_ids": out[:, width:].tolist()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
