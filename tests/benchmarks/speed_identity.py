"""Rows of `make bench-speed`: the same bits with and without drafts, and what that costs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Any

from gateway.cli.processes import StackError
from gateway.client import AsyncClient, Generation, Options
from tests.benchmarks.answers import Prompts, ask
from tests.benchmarks.harness import Row, Scale, bounded, interleave, ratios, spread
from tests.benchmarks.prompts import chats, edits, essays
from tests.benchmarks.stack import NGRAM, shared

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
    """What rows that do not depend on their batch cost, undrafted."""
    try:
        with shared() as same, shared(args=["--allow-batch-dependent"]) as any_batch:
            for num in (1, 16):
                yield from _cost(num, {"invariant": same, "any": any_batch}, scale)
    except StackError as error:
        yield Row("cost of row invariance", f"not measured: --allow-batch-dependent: {error}")


def _cost(num: int, addresses: dict[str, str], scale: Scale) -> Iterator[Row]:
    prompts = chats(num)

    def rate(address: str) -> float:
        return ask(address, prompts, scale.num_tokens, speculate=False).rate

    contenders = {name: partial(rate, address) for name, address in addresses.items()}
    for run in contenders.values():
        run()  # warm up
    rates = interleave(contenders, scale.rounds)
    for name, found in rates.items():
        yield Row(f"{num:2} requests, rows {name}", f"{spread(found, '.1f')} tok/s")
    cost = 100 * (1 - median(ratios(rates["invariant"], rates["any"])))
    yield bounded(f"{num:2} requests, cost of row invariance", cost, "<=", 5, " %")
