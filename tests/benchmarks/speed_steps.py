"""Rows of `make bench-speed`: a step by itself, its attention, and the host's share of it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

from tests.benchmarks.answers import ask
from tests.benchmarks.harness import Row, Scale, bounded, ratios, spread
from tests.benchmarks.prompts import chats
from tests.benchmarks.stack import TARGET, apart, two_cores
from tests.benchmarks.steps import Measured, Point, measure

ONE, EIGHT = Point(1, 1, 200), Point(1, 8, 200)
SHORT, LONG = Point(16, 1, 16), Point(16, 1, 2000)
THREADS = 2


def steps(scale: Scale) -> Iterator[Row]:
    """A step with 8 rows against one with 1, and attention against reading its bytes."""
    rounds = 2 if scale.quick else 9
    found = measure([ONE, EIGHT, SHORT, LONG], rounds, two_cores(), THREADS)
    for point, name in ((ONE, "1 row"), (EIGHT, "8 rows of one sequence")):
        times = [s * 1e3 for s in found.seconds[point]]
        yield Row(f"step, context 200, {name}", f"{spread(times, '.1f')} ms")
    more = median(ratios(found.seconds[EIGHT], found.seconds[ONE]))
    yield bounded("step, 8 rows / 1 row", more, "<=", 1.25, "x")
    yield Row("plain read", f"{found.bytes_per_second / 1e9:.1f} GB/s")
    yield attention(found)


def attention(found: Measured) -> Row:
    """Bytes of keys and values over what a step takes longer for them, against a plain read."""
    pairs = zip(found.seconds[LONG], found.seconds[SHORT], strict=True)
    seconds = median(long - short for long, short in pairs)
    num_tokens = LONG.sequences * (LONG.context - SHORT.context)
    rate = num_tokens * found.kv_bytes_per_token / seconds
    what = f"attention, 16 x 2,000, {rate / 1e9:.1f} GB/s / plain read"
    return bounded(what, 100 * rate / found.bytes_per_second, ">=", 50, " %")


def host(scale: Scale) -> Iterator[Row]:
    """From the begin of a pass to the next one's: the part outside the model."""
    with tempfile.TemporaryDirectory() as folder:
        timings = Path(folder) / "passes"
        target = ("tests.benchmarks.timed_target", *TARGET[1:], f"--timings={timings}")
        loads = [1, max(scale.loads)]
        with apart(target) as address:
            for num in loads:
                for _ in range(2):
                    ask(address, chats(num), scale.num_tokens, speculate=False)
        passes = [json.loads(line) for line in timings.read_text().splitlines()]
    for num in loads:
        shares, periods = list[float](), list[float]()
        for (began, ended, rows), (then, _, more) in pairwise(passes):
            if rows == more == num:  # all of them decode
                periods.append((then - began) * 1e3)
                shares.append(100 * (1 - (ended - began) / (then - began)))
        what = f"{num:2} requests, {median(periods):.1f} ms a step, outside the model"
        yield bounded(what, median(shares), "<=", 10, " %")
