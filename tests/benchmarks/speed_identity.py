"""Rows of `make bench-speed`: the same bits with and without drafts, and what that costs."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

from gateway.client import AsyncClient, Generation, Options
from tests.benchmarks.answers import Prompts
from tests.benchmarks.harness import Row, Scale, bounded, ratios, spread
from tests.benchmarks.prompts import edits, essays
from tests.benchmarks.stack import NGRAM, shared, two_cores

AT_ONCE, FIRST_SEED = 16, 1000
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"temperature": 1.0, "rule": "coupled"},
}


def identity(scale: Scale) -> Iterator[Row]:
    """Every request drafted and undrafted, in another order, so among other batch mates.

    The target tests whatever has arrived, paying or not: drafted rows are what could differ.
    """
    prompts = [*edits(), *essays(scale.num_prompts)][: scale.num_prompts]
    with shared(draft=NGRAM, args=["--objective=fixed"]) as address:
        for name, options in KINDS.items():
            texts = {}
            for speculate in (False, True):
                asked = Options(
                    max_tokens=scale.num_tokens, ignore_eos=True, speculate=speculate, **options
                )
                texts[speculate] = asyncio.run(_answers(address, prompts, asked, speculate))
            same = sum(
                a.token_ids == b.token_ids for a, b in zip(texts[False], texts[True], strict=True)
            )
            lengths = {len(a.token_ids) for answers in texts.values() for a in answers}
            assert lengths == {scale.num_tokens}, f"answers of {lengths} tokens"
            figures = [a.finished.speculation for a in texts[True]]
            what = f"identity, {name}: {len(prompts)} texts of {scale.num_tokens}"
            tested = sum(f.tested for f in figures)
            accepted = sum(f.accepted for f in figures)
            yield Row(f"{what}, drafted", f"{accepted} of {tested} tested accepted")
            yield bounded(f"{what}, the same", 100 * same / len(prompts), "==", 100, " %")


async def _answers(
    address: str, prompts: Prompts, options: Options, shuffled: bool
) -> list[Generation]:
    """Sixteen at a time, each with its own seed."""
    order = list(range(len(prompts)))
    if shuffled:
        random.Random(0).shuffle(order)
    found: dict[int, Generation] = {}
    waiting = iter(order)
    async with AsyncClient(address) as client:

        async def serve() -> None:
            for i in waiting:
                found[i] = await client.generate(prompts[i], options, seed=FIRST_SEED + i)

        await asyncio.gather(*[serve() for _ in range(AT_ONCE)])
    return [found[i] for i in range(len(prompts))]


def invariance(scale: Scale) -> Iterator[Row]:
    """What rows that do not depend on their batch cost a pass."""
    rounds = "3" if scale.quick else "61"
    command = [sys.executable, "-m", "tests.benchmarks.invariance", two_cores(), "2", rounds]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    for num, (same, any_batch) in zip(
        (1, 16), json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        for name, found in (("invariant", same), ("any", any_batch)):
            yield Row(f"{num:2} rows, {name}", f"{spread([s * 1e3 for s in found], '.1f')} ms")
        cost = 100 * (median(ratios(same, any_batch)) - 1)
        yield bounded(f"{num:2} requests, cost of row invariance", cost, "<=", 5, " %")
