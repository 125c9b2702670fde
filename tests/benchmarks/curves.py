"""Curves, as JSON and PNG: `make bench-curves`.

load: throughput, time to first token and between tokens against requests at once, for three
lengths of prompts. steps: time of a pass against rows and context, with the floors of memory and
arithmetic, and the rate at which attention reads. acceptance: speedup against how often drafts
are right.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from tests.benchmarks.answers import generations
from tests.benchmarks.harness import FULL, QUICK, Row, Scale, ratios, report, spread
from tests.benchmarks.pictures import Line, Panel, draw
from tests.benchmarks.prompts import chats, of_length
from tests.benchmarks.speed_drafts import against_undrafted
from tests.benchmarks.stack import NGRAM, TARGET, apart, replaying, two_cores
from tests.benchmarks.steps import Measured, Point, measure

MOST_KV_TOKENS = 140_000  # 64 requests with prompts of 2,000, in 3 GB
PERCENT = (0, 30, 50, 70, 90)
THREADS = 2


@dataclass(frozen=True)
class Found:
    """What a part found: rows for the table, panels for the picture, data for the JSON."""

    rows: list[Row]
    panels: list[Panel]
    data: Any


def load(scale: Scale) -> Found:
    """Drafted by n-gram and undrafted, at 1 to 64 requests."""
    loads, lengths = (
        ((1, 4), (40, 500)) if scale.quick else ((1, 2, 4, 8, 16, 32, 64), (40, 500, 2000))
    )
    panels = [
        Panel(title, "requests at once", label)
        for title, label in (
            ("throughput", "tokens per second"),
            ("time to first token", "ms, median request"),
            ("between tokens", "ms, median request"),
        )
    ]
    rows, data = [], []
    with apart([*TARGET, f"--num-kv-tokens={MOST_KV_TOKENS}"], NGRAM) as address:
        for length, speculate in product(lengths, (False, True)):
            kind = f"{length}, {'drafted' if speculate else 'undrafted'}"
            curve: dict[int, list[dict[str, float]]] = {}
            for num in loads:
                prompts = of_length(num, length)
                rounds = 1 if num * length > 20_000 else min(3, scale.rounds)
                curve[num] = [_figures(address, prompts, speculate, scale) for _ in range(rounds)]
                rows.append(_load_row(f"prompts of {kind}, {num:2} requests", curve[num]))
                print(rows[-1], flush=True)
            for panel, key in zip(panels, ("rate", "first_ms", "between_ms"), strict=True):
                values = [[f[key] for f in found] for found in curve.values()]
                ends = [min(v) for v in values], [max(v) for v in values]
                panel.lines.append(Line(kind, loads, [median(v) for v in values], *ends))
            data.append({"prompt_len": length, "drafted": speculate, "runs": curve})
    return Found(rows, panels, data)


def _figures(
    address: str, prompts: list[list[int]], speculate: bool, scale: Scale
) -> dict[str, float]:
    seconds, answers = generations(address, prompts, scale.num_tokens, speculate=speculate)
    timings = [a.finished.timing for a in answers]
    first = [1e3 * t.time_to_first_token_seconds for t in timings]
    between = [1e3 * t.steps_seconds / (scale.num_tokens - 1) for t in timings]
    rate = len(prompts) * scale.num_tokens / seconds
    return {"rate": rate, "first_ms": median(first), "between_ms": median(between)}


def _load_row(what: str, found: list[dict[str, float]]) -> Row:
    rate, first, between = (
        spread([f[key] for f in found], form)
        for key, form in (("rate", ".0f"), ("first_ms", ".0f"), ("between_ms", ".1f"))
    )
    return Row(what, f"{rate} tok/s, first after {first} ms, then every {between} ms")


def steps(scale: Scale) -> Found:
    """Sequences with a row each, one sequence with many rows, and contexts."""
    nums = (1, 4, 16) if scale.quick else (1, 2, 4, 8, 16, 32, 64)
    contexts = (100, 1000) if scale.quick else (100, 500, 1000, 2000, 4000, 8000)
    apiece = [Point(n, 1, 100) for n in nums]
    verified = [Point(1, n, 100) for n in nums]
    grid = {
        s: [Point(s, 1, c) for c in contexts if s * c <= MOST_KV_TOKENS] for s in (1, 16, nums[-1])
    }
    points = list(dict.fromkeys([*apiece, *verified, *(p for some in grid.values() for p in some)]))
    found = measure(points, min(5, scale.rounds), two_cores(), THREADS)
    by_rows = Panel("pass, context 100", "rows", "ms")
    for name, some in (("a row a sequence", apiece), ("all of one sequence", verified)):
        by_rows.lines.append(_times(found, name, [p.sequences * p.rows for p in some], some))
    by_rows.lines.extend(_floors(found, nums, apiece))
    by_context = Panel("pass, a row a sequence", "context", "ms", log_y=True)
    reading = Panel("attention alone", "context", "GB/s")
    for num, some in grid.items():
        lengths = [p.context for p in some]
        by_context.lines.append(_times(found, f"{num} sequences", lengths, some))
        floor = [1e3 * found.read_floor(p) for p in some]
        by_context.lines.append(Line(f"{num}: read floor", lengths, floor, style=":"))
        rates = [_read_rate(found, some[0], p) / 1e9 for p in some[1:]]
        reading.lines.append(Line(f"{num} sequences", lengths[1:], rates))
    plain = [found.bytes_per_second / 1e9] * 2
    reading.lines.append(Line("plain read", [contexts[1], contexts[-1]], plain, style=":"))
    rows = [Row("plain read", f"{plain[0]:.1f} GB/s")]
    rows.append(Row("large product", f"{found.flops_per_second / 1e9:.0f} GFLOP/s"))
    for p in points:
        value = spread([1e3 * s for s in found.seconds[p]], ".1f")
        floor_ms = 1e3 * max(found.read_floor(p), found.compute_floor(p))
        what = f"pass, {p.sequences:2} sequences x {p.rows:2} rows, context {p.context}"
        rows.append(Row(what, f"{value} ms, floor {floor_ms:.1f} ms"))
    times = [{**vars(p), "seconds": found.seconds[p]} for p in points]
    data = {k: v for k, v in vars(found).items() if k != "seconds"} | {"passes": times}
    return Found(rows, [by_rows, by_context, reading], data)


def _times(found: Measured, name: str, x: list[int], points: list[Point]) -> Line:
    values = [[1e3 * s for s in found.seconds[p]] for p in points]
    ends = [min(v) for v in values], [max(v) for v in values]
    return Line(name, x, [median(v) for v in values], *ends)


def _floors(found: Measured, x: tuple[int, ...], points: list[Point]) -> Iterator[Line]:
    yield Line("read floor", x, [1e3 * found.read_floor(p) for p in points], style=":")
    yield Line("arithmetic floor", x, [1e3 * found.compute_floor(p) for p in points], style="--")


def _read_rate(found: Measured, short: Point, long: Point) -> float:
    """Bytes per second of the keys and values that make one pass longer than the other."""
    num = long.sequences * long.context - short.sequences * short.context
    seconds = found.median(long) - found.median(short)
    return num * found.kv_bytes_per_token / seconds


def acceptance(scale: Scale) -> Found:
    """One request and four, the target on one core, the replaying draft on another."""
    rows, data = [], []
    panel = Panel("replayed drafts", "drafts right, %", "drafted / undrafted", log_x=False)
    with tempfile.TemporaryDirectory() as folder:
        prompts = chats(4)
        with replaying(prompts, scale.num_tokens, Path(folder)) as address:
            for num in (1, 4):
                values = []
                for percent in PERCENT:
                    rates = against_undrafted(address, prompts[:num], percent, scale)
                    values.append(ratios(rates["drafted"], rates["undrafted"]))
                    what = f"{num} requests, drafts right in {percent} %: drafted / undrafted"
                    rows.append(Row(what, f"{spread(values[-1])}x"))
                    data.append({"requests": num, "percent": percent, "rates": rates})
                    print(rows[-1], flush=True)
                ends = [min(v) for v in values], [max(v) for v in values]
                medians = [median(v) for v in values]
                panel.lines.append(Line(f"{num} requests", PERCENT, medians, *ends))
    return Found(rows, [panel], data)


PARTS: dict[str, Callable[[Scale], Found]] = {
    "load": load,
    "steps": steps,
    "acceptance": acceptance,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="show that it works; no figures")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS), help="parts")
    args = parser.parse_args()
    for part in args.only:
        found = PARTS[part](QUICK if args.quick else FULL)
        name = f"bench-curves-{part}" + ("-quick" if args.quick else "")
        report(name, found.rows, data=found.data)
        print(draw(name, found.panels))


if __name__ == "__main__":
    main()
