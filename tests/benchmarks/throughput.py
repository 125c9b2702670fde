"""Tokens per second and step time, drafted and undrafted, next to transformers' `generate`.

All on the same cores, in one run, interleaved: `make bench-throughput`. The packaged model in
bfloat16, greedy, the same prompts and number of tokens for everybody; Tandem's target has all
cores but one, n-gram draft and gateway share the last; transformers has all.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from common import tokenizer
from common.tokenizer import Tokenizer
from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient, Generation, Options
from tests.benchmarks.harness import Row, bounded, interleave, ratios, report, spread
from tests.integration.stacks import PROMPTS, packaged_model

CONCURRENCY = (1, 4, 16, 32)
NUM_TOKENS, NUM_ROUNDS, DTYPE = 64, 3, "bfloat16"


class TransformersWorker:
    """`generate` in its own process, on all cores."""

    def __init__(self, folder: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.benchmarks.transformers_worker", folder, DTYPE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},
        )
        assert self._read_line() == "ready\n"

    def run(self, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        """Seconds and token ids of one batch."""
        assert self._process.stdin is not None
        job = {"prompts": prompts, "num_tokens": NUM_TOKENS}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._read_line())
        return answer["seconds"], answer["token_ids"]

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()


def _tandem(
    address: str, prompts: list[list[int]], speculate: bool
) -> tuple[float, list[Generation]]:
    """Seconds and answers of all prompts at once."""
    options = Options(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, speculate=speculate)

    async def main() -> tuple[float, list[Generation]]:
        async with AsyncClient(address) as client:
            await client.status()  # connected before the clock starts
            began = time.perf_counter()
            answers = await asyncio.gather(*[client.generate(p, options) for p in prompts])
            return time.perf_counter() - began, list(answers)

    return asyncio.run(main())


def measure(
    address: str, worker: TransformersWorker, prompts: list[list[int]]
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Tokens per second of each contender in each round, and the last answers of each."""
    last: dict[str, Any] = {}

    def tandem(name: str, speculate: bool) -> float:
        seconds, last[name] = _tandem(address, prompts, speculate)
        assert all(len(a.token_ids) == NUM_TOKENS for a in last[name])
        return len(prompts) * NUM_TOKENS / seconds

    def transformers() -> float:
        seconds, last["transformers"] = worker.run(prompts)
        assert all(len(ids) == NUM_TOKENS for ids in last["transformers"])
        return len(prompts) * NUM_TOKENS / seconds

    contenders: dict[str, Callable[[], float]] = {
        "drafted": partial(tandem, "drafted", True),
        "undrafted": partial(tandem, "undrafted", False),
        "transformers": transformers,
    }
    return interleave(contenders, NUM_ROUNDS), last


def rows_for(num: int, rates: dict[str, list[float]], last: dict[str, Any]) -> list[Row]:
    """The table's rows for one concurrency."""
    rows = []
    for name, found in rates.items():
        value = f"{spread(found, '.1f')} tok/s"
        if name != "transformers":
            figures = [a.finished for a in last[name]]
            # From the first decision to the last there is one pause less than decisions.
            pauses = [max(1, f.speculation.steps - 1) for f in figures]
            steps = [f.timing.steps_seconds / n * 1e3 for f, n in zip(figures, pauses, strict=True)]
            value += f", step {statistics.median(steps):.0f} ms"
        if name == "drafted":
            tested = sum(f.speculation.tested for f in figures)
            value += f", accepted {sum(f.speculation.accepted for f in figures)} of {tested}"
        rows.append(Row(f"{num:2} requests, {name}", value))
    for ours, theirs in (("undrafted", "transformers"), ("drafted", "undrafted")):
        ratio = statistics.median(ratios(rates[ours], rates[theirs]))
        rows.append(bounded(f"{num:2} requests, {ours} / {theirs}", ratio, ">=", 1.0, "x"))
    return rows


def main() -> None:
    folder = packaged_model()
    speaker = Tokenizer(tokenizer.read_files(Path(folder)))
    rows: list[Row] = []
    with LocalStack(draft="ngram", dtype=DTYPE) as stack, TransformersWorker(folder) as worker:
        for num in CONCURRENCY:
            texts = [PROMPTS[i % len(PROMPTS)] for i in range(num)]
            prompts = [list(speaker.render_chat([{"role": "user", "content": t}])) for t in texts]
            _tandem(stack.gateway_address, prompts, speculate=False)  # warm up
            worker.run(prompts)
            rates, last = measure(stack.gateway_address, worker, prompts)
            rows += rows_for(num, rates, last)
            if num == 1:
                for name, answers in last.items():
                    ids = answers[0] if name == "transformers" else list(answers[0].token_ids)
                    print(f"first 16 tokens, {name:12}: {speaker.decode(ids[:16])!r}")
    report("bench-throughput", rows)


if __name__ == "__main__":
    main()
