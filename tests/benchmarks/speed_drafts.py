"""Rows of `make bench-speed`: drafted against undrafted, n-gram and replayed drafts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from tests.benchmarks.answers import Prompts, ask, generations
from tests.benchmarks.harness import Row, Scale, bounded, interleave, ratios, spread
from tests.benchmarks.prompts import chats, edits
from tests.benchmarks.replay_draft import seed_for
from tests.benchmarks.stack import NGRAM, replaying, shared, undrafted

NUM_CHATS = 10


def ngram(scale: Scale) -> Iterator[Row]:
    """One request after the other, chats and edits, all processes on the same two cores."""
    sets = {"chats": (chats(NUM_CHATS), 1.15), "edits": (edits(), 2.0)}
    with undrafted() as ours:
        threads, _ = ours.best(sets["chats"][0][:1], scale.num_tokens)
    with shared(threads, NGRAM) as address:
        for name, (prompts, bound) in sets.items():
            some = prompts[:2] if scale.quick else prompts
            yield from _one_by_one(address, name, some, bound, scale)


def _one_by_one(
    address: str, name: str, prompts: Prompts, bound: float, scale: Scale
) -> Iterator[Row]:
    tested = accepted = 0

    def rate(speculate: bool) -> float:
        nonlocal tested, accepted
        total = 0.0
        for prompt in prompts:
            seconds, answers = generations(address, [prompt], scale.num_tokens, speculate=speculate)
            total += seconds
            tested += answers[0].finished.speculation.tested
            accepted += answers[0].finished.speculation.accepted
        return len(prompts) * scale.num_tokens / total

    ask(address, prompts[:1], scale.num_tokens)  # warm up
    contenders = {"drafted": partial(rate, True), "undrafted": partial(rate, False)}
    rates = interleave(contenders, min(3, scale.rounds))
    for kind, found in rates.items():
        yield Row(f" 1 request, {name}, {kind}", f"{spread(found, '.1f')} tok/s")
    yield Row(f" 1 request, {name}, accepted", f"{accepted} of {tested} tested")
    against = median(ratios(rates["drafted"], rates["undrafted"]))
    yield bounded(f" 1 request, {name}, n-gram drafted / undrafted", against, ">=", bound, "x")


def replayed(scale: Scale) -> Iterator[Row]:
    """Drafts right in 70 per cent and never, the target on one core and the draft on another."""
    prompts = chats(16)
    with (
        tempfile.TemporaryDirectory() as folder,
        replaying(prompts, scale.num_tokens, Path(folder)) as address,
    ):
        for num, percent, bound in ((1, 70, 2.2), (1, 0, 0.97), (16, 0, 0.97)):
            rates = against_undrafted(address, prompts[:num], percent, scale)
            what = f"{num:2} requests, drafts right in {percent} %, one core each"
            for kind, found in rates.items():
                yield Row(f"{what}: {kind}", f"{spread(found, '.1f')} tok/s")
            against = median(ratios(rates["drafted"], rates["undrafted"]))
            yield bounded(f"{what}: drafted / undrafted", against, ">=", bound, "x")


def against_undrafted(
    address: str, prompts: Prompts, percent: int, scale: Scale
) -> dict[str, list[float]]:
    """Tokens per second, drafted and undrafted, of a stack that replays."""

    def rate(round_seeds: Iterator[Sequence[int]], speculate: bool) -> float:
        seeds = next(round_seeds)
        return ask(address, prompts, scale.num_tokens, seeds, speculate=speculate).rate

    contenders = {
        kind: partial(rate, _seeds(len(prompts), percent), speculate)
        for kind, speculate in (("drafted", True), ("undrafted", False))
    }
    for run in contenders.values():
        run()  # warm up
    return interleave(contenders, scale.rounds)


def _seeds(num: int, percent: int) -> Iterator[list[int]]:
    """Other errors in every round, at the same rate."""
    variant = 0
    while True:
        yield [seed_for(percent, variant=variant + i) for i in range(num)]
        variant += num
