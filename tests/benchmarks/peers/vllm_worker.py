"""vLLM's CPU build in a process of its own; runs in its own virtual environment."""

from __future__ import annotations

import itertools
import sys
import time

from tests.benchmarks.peers.protocol import Answer, serve, take_stdout

KV_BYTES = 4 << 30  # by itself it takes nearly all memory


def main() -> None:
    out = take_stdout()
    folder, context_len, max_running = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    from vllm import LLM, SamplingParams

    # Prefixes are not kept: a repeated prompt must be read as often as it is asked.
    engine = LLM(
        model=folder,
        dtype="bfloat16",
        max_model_len=context_len,
        max_num_seqs=max_running,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=KV_BYTES,
    ).llm_engine
    ids = itertools.count()

    def answer(prompts: list[list[int]], num_tokens: int) -> Answer:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        order = [str(next(ids)) for _ in prompts]
        for name, prompt in zip(order, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        first: dict[str, float] = {}
        texts: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            for told in engine.step():
                first.setdefault(told.request_id, time.perf_counter() - began)
                texts[told.request_id] = list(told.outputs[0].token_ids)
        return [first[name] for name in order], [texts[name] for name in order]

    serve(answer, out)


if __name__ == "__main__":  # vLLM may start processes of its own, which import this file
    main()
