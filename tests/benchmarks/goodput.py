"""Does drafting ever cost more than it brings? `make bench-goodput`.

Drafts that replay the target's own greedy answers, right in 90, 50 and 0 per cent, at 1 to 32
requests: tokens per second drafted against undrafted, and against the best fixed lookahead
that a sweep finds in the same run. Packaged model, bfloat16, the target on one core, draft,
gateways and client on the other; interleaved, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from common import tokenizer
from common.tokenizer import Tokenizer
from gateway.cli.processes import ServiceProcess, share_cores
from gateway.client import AsyncClient, Options
from tests.benchmarks.harness import Row, bounded, interleave, ratios, report, spread
from tests.benchmarks.replay_draft import seed_for
from tests.integration.collector import Collector
from tests.integration.stacks import PROMPTS, packaged_model

CONCURRENCY = (1, 2, 4, 8, 16, 32)
QUALITY = {"good": 90, "mediocre": 50, "wrong": 0}
FIXED = (1, 2, 4, 8, 16)
NUM_TOKENS, NUM_SWITCHING = 64, 500
SWITCH_AT, WINDOW, FOLLOWS_WITHIN, SETTLED = 150, 8, 20, 60


class Stack:
    """Two targets on one core, one with a fixed lookahead; a draft and two gateways on another."""

    def __init__(self, stack: contextlib.ExitStack, env: dict[str, str]) -> None:
        self._stack, self._env = stack, env
        self._cores, self._core = share_cores()
        self._targets = {
            name: self._start("target_service", f"--cores={self._cores}", *args)
            for name, args in (("goodput", []), ("fixed", ["--objective=fixed"]))
        }
        self.gateways: dict[str, str] = {}

    def _start(self, module: str, *args: str) -> ServiceProcess:
        process = ServiceProcess(module, ["--port=0", *args], self._env)
        self._stack.callback(process.kill)
        return process

    def start(self, texts: Path | None) -> None:
        """Start gateways, with a draft if there are texts to replay."""
        args = [f"--cores={self._core}", "--lookahead=16"]
        if texts is not None:
            module, texts_flag = "tests.benchmarks.replay_draft", f"--texts={texts}"
            draft = self._start(module, f"--cores={self._core}", texts_flag)
            args.append(f"--draft={draft.wait_until_serving(60)}")
        for name, target in self._targets.items():
            address = target.wait_until_serving(300)
            gateway = self._start("gateway", f"--target={address}", *args)
            self.gateways[name] = gateway.wait_until_serving(60)


def answers(
    address: str, prompts: Sequence[Sequence[int]], seeds: Iterable[int], **options: object
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds and answers of all prompts at once, greedily."""
    asked = Options(temperature=0.0, ignore_eos=True, **options)  # type: ignore[arg-type]

    async def main() -> tuple[float, list[tuple[int, ...]]]:
        async with AsyncClient(address) as client:
            await client.status()  # connected before the clock starts
            began = time.perf_counter()
            told = await asyncio.gather(
                *[client.generate(p, asked, seed=s) for p, s in zip(prompts, seeds, strict=True)]
            )
            return time.perf_counter() - began, [a.token_ids for a in told]

    return asyncio.run(main())


def point(
    gateways: dict[str, str],
    prompts: list[list[int]],
    percent: int,
    lookaheads: Sequence[int],
    num_rounds: int,
) -> dict[str, list[float]]:
    """Tokens per second of each contender at one load and one quality of drafts."""
    seeds = [seed_for(percent, variant=i) for i in range(len(prompts))]
    expected: list[tuple[int, ...]] = []

    def run(gateway: str, **options: object) -> float:
        seconds, texts = answers(
            gateways[gateway], prompts, seeds, max_tokens=NUM_TOKENS, **options
        )
        expected[:] = expected or texts
        assert texts == expected, "an answer has changed"
        return len(prompts) * NUM_TOKENS / seconds

    contenders: dict[str, Callable[[], float]] = {
        "undrafted": partial(run, "goodput", speculate=False),
        "drafted": partial(run, "goodput"),
        "fixed 0": partial(run, "fixed", speculate=False),
    }
    contenders |= {f"fixed {k}": partial(run, "fixed", lookahead=k) for k in lookaheads}
    for name in ("undrafted", "drafted", "fixed 0"):
        contenders[name]()  # warm up
    return interleave(contenders, num_rounds)


def rows_for(what: str, rates: dict[str, list[float]]) -> Iterable[Row]:
    """The table's rows for one point."""
    medians = {name: statistics.median(found) for name, found in rates.items()}
    best = max((name for name in rates if name.startswith("fixed")), key=medians.__getitem__)
    yield Row(f"{what}, undrafted", f"{spread(rates['undrafted'], '.0f')} tok/s")
    against = statistics.median(ratios(rates["drafted"], rates["undrafted"]))
    yield bounded(f"{what}, drafted / undrafted", against, ">=", 0.97, "x")
    against = statistics.median(ratios(rates["drafted"], rates[best]))
    yield bounded(f"{what}, drafted / {best}, the best", against, ">=", 0.90, "x")


def switch_rows(
    address: str, collector: Collector, prompt: list[int], before: int, after: int
) -> Iterable[Row]:
    """How many steps the number of tested tokens needs to follow a switch of domain."""
    collector.spans.clear()
    options = {"max_tokens": NUM_SWITCHING, "lookahead": 16}
    answers(address, [prompt], [seed_for(before, after, SWITCH_AT)], **options)
    time.sleep(3.0)  # until the spans are here
    steps = sorted(
        (s.get("tandem.committed_len") - len(prompt), s.get("tandem.told_lookahead"))
        for s in collector.spans
        if s.span.name == "target.verify"
    )
    first = next(i for i, (position, _) in enumerate(steps) if position >= SWITCH_AT)
    told = [num for _, num in steps[:-1]]
    old = statistics.mean(told[first // 2 : first])
    # Later on what a row is thought to cost may change, and the lookahead with it.
    new = statistics.mean(told[first + FOLLOWS_WITHIN :][:SETTLED])
    there = statistics.mean(told[first + FOLLOWS_WITHIN :][:WINDOW])
    share = (there - old) / (new - old)
    what = f"switch from {before} to {after} % right: lookahead {old:.1f}, then {new:.1f}"
    yield bounded(f"{what}; share of the way after 20 steps", share, ">=", 0.75)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each kind")
    parser.add_argument("--requests", type=int, nargs="+", default=CONCURRENCY, help="at once")
    args = parser.parse_args()
    speaker = Tokenizer(tokenizer.read_files(Path(packaged_model())))
    asked = [f"{PROMPTS[i % len(PROMPTS)]} ({i})" for i in range(max(args.requests))]
    prompts = [list(speaker.render_chat([{"role": "user", "content": t}])) for t in asked]
    rows: list[Row] = []
    with contextlib.ExitStack() as cleanup:
        collector = cleanup.enter_context(Collector())
        texts = Path(cleanup.enter_context(tempfile.TemporaryDirectory())) / "texts.json"
        stack, traced = Stack(cleanup, {}), Stack(cleanup, collector.env)
        stack.start(None)
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # leave the target's core alone
        recorded: list[tuple[int, ...]] = []
        for some, num in ((prompts[:1], NUM_SWITCHING), (prompts[1:], NUM_TOKENS)):
            address = stack.gateways["goodput"]
            seeds = [0] * len(some)
            recorded += answers(address, some, seeds, max_tokens=num, speculate=False)[1]
        texts.write_text(json.dumps(list(zip(prompts, recorded, strict=True))))
        stack.start(texts)
        traced.start(texts)
        for before, after in ((95, 5), (5, 95)):
            address = traced.gateways["goodput"]
            rows += switch_rows(address, collector, prompts[0], before, after)
        for num in args.requests:
            for name, percent in QUALITY.items():
                fixed = FIXED if percent else FIXED[:1]
                rates = point(stack.gateways, prompts[:num], percent, fixed, args.rounds)
                rows += rows_for(f"{num:2} requests, {name} drafts", rates)
                print(*rows[-3:], sep="\n", flush=True)
    report("bench-goodput", rows)


if __name__ == "__main__":
    main()
