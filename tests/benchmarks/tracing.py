"""What tracing costs: tokens per second with it off, unsampled, sampled, and into a black hole.

`make bench-tracing`. Three stacks with the packaged model stand side by side, one at work at a
time; rounds are interleaved and every figure is a median of ratios of neighbouring runs. Only
the processes differ: what they export to, and the trace context of their callers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from common import tokenizer
from common.tokenizer import Tokenizer
from gateway.cli.processes import LocalStack
from gateway.client import AsyncClient, Options
from tests.benchmarks.harness import Row, bounded, interleave, ratios, report, spread
from tests.integration.collector import BlackHole, Collector
from tests.integration.stacks import PROMPTS, packaged_model

CONCURRENCY = (1, 16)
DTYPE = "bfloat16"
BOUND = 0.97
UNSAMPLED = f"00-{1:032x}-{1:016x}-00"


def rate(address: str, prompts: list[list[int]], num_tokens: int, traceparent: str = "") -> float:
    """Tokens per second of all prompts at once."""
    options = Options(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, traceparent=traceparent
    )

    async def main() -> float:
        async with AsyncClient(address) as client:
            await client.status()  # connected before the clock starts
            began = time.perf_counter()
            answers = await asyncio.gather(*[client.generate(p, options) for p in prompts])
            assert all(len(a.token_ids) == num_tokens for a in answers)
            return len(prompts) * num_tokens / (time.perf_counter() - began)

    return asyncio.run(main())


def rows_for(num: int, rates: dict[str, list[float]]) -> Iterable[Row]:
    """The table's rows for one concurrency."""
    for name, found in rates.items():
        yield Row(f"{num:2} requests, {name}", f"{spread(found, '.1f')} tok/s")
    for name in ("unsampled", "sampled", "black hole"):
        found = ratios(rates[name], rates["off"])
        yield bounded(f"{num:2} requests, {name} / off", statistics.median(found), ">=", BOUND, "x")
    # Two stacks differ by some per cent for reasons of their own; the same one does not.
    found = ratios(rates["sampled"], rates["unsampled"])
    what = f"{num:2} requests, sampled / unsampled, same processes"
    yield bounded(what, statistics.median(found), ">=", BOUND, "x")
    noise = ratios(rates["off again"], rates["off"])
    yield Row(f"{num:2} requests, off / off: the noise", spread(noise, ".3f"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of a request")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each kind")
    parser.add_argument("--requests", type=int, nargs="+", default=CONCURRENCY, help="at once")
    args = parser.parse_args()
    speaker = Tokenizer(tokenizer.read_files(Path(packaged_model())))
    rows: list[Row] = []
    with contextlib.ExitStack() as stacks:
        collector = stacks.enter_context(Collector())
        hole = stacks.enter_context(BlackHole())
        addresses = {
            name: stacks.enter_context(
                LocalStack(draft="ngram", dtype=DTYPE, env=env)
            ).gateway_address
            for name, env in (("off", {}), ("traced", collector.env), ("hole", hole.env))
        }
        # Clients and collectors are elsewhere in life; here they must not take the target's core.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        for num in args.requests:
            texts = [PROMPTS[i % len(PROMPTS)] for i in range(num)]
            prompts = [list(speaker.render_chat([{"role": "user", "content": t}])) for t in texts]

            def run(stack: str, traceparent: str = "", prompts: list[list[int]] = prompts) -> float:
                return rate(addresses[stack], prompts, args.tokens, traceparent)

            contenders: dict[str, Callable[[], float]] = {
                "off": partial(run, "off"),
                "unsampled": partial(run, "traced", UNSAMPLED),
                "sampled": partial(run, "traced"),
                "black hole": partial(run, "hole"),
                "off again": partial(run, "off"),
            }
            for address in addresses.values():
                rate(address, prompts, args.tokens)  # warm up
            before = len(collector.spans)
            rows += rows_for(num, interleave(contenders, args.rounds))
            made = (len(collector.spans) - before) / (args.rounds * num * args.tokens)
            rows.append(Row(f"{num:2} requests, spans a token", f"{made:.2f}"))
    report("bench-tracing", rows)


if __name__ == "__main__":
    main()
