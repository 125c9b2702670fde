"""How every measuring command ends: a table *what, measured, bound, holds*, and JSON.

A benchmark exits 0 whether or not bounds hold; it fails only if it could not measure.
"""

from __future__ import annotations

import json
import operator
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

BUILD = Path("build")
_COMPARE = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Row:
    """One figure; `holds` is None where there is no bound to hold."""

    what: str
    value: str
    bound: str = ""
    holds: bool | None = None


@dataclass(frozen=True)
class Scale:
    """How much a measuring command does; the quick one only shows that it works."""

    num_tokens: int = 128
    rounds: int = 5
    loads: tuple[int, ...] = (1, 4, 16, 32)
    num_prompts: int = 200  # of the largest set
    quick: bool = False


FULL = Scale()
QUICK = Scale(num_tokens=16, rounds=1, loads=(1, 4), num_prompts=8, quick=True)


def bounded(what: str, value: float, relation: str, bound: float, unit: str = "") -> Row:
    """A figure that is to be at least, at most or equal to a bound."""
    holds = bool(_COMPARE[relation](value, bound))
    return Row(what, f"{value:.2f}{unit}", f"{relation} {bound:g}{unit}", holds)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ratio of each pair of interleaved runs."""
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median and range."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}}-{high:{form}})"


def interleave(
    contenders: Mapping[str, Callable[[], float]], num_rounds: int
) -> dict[str, list[float]]:
    """Run all contenders in turn, round by round, so that slow spells hit them alike."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(num_rounds):
        order = list(contenders)
        for name in order if i % 2 == 0 else reversed(order):
            found[name].append(contenders[name]())
    return found


def report(target: str, rows: Iterable[Row], **data: Any) -> None:
    """Print the table and write `build/<target>.json`, with whatever data stand behind it."""
    rows = list(rows)
    table = Table("what", "measured", "bound", "holds", title=target)
    marks = {None: "", True: "yes", False: "NO"}
    for row in rows:
        table.add_row(row.what, row.value, row.bound, marks[row.holds])
    Console(width=110).print(table)
    BUILD.mkdir(exist_ok=True)
    found: dict[str, Any] = {
        "rows": [asdict(r) for r in rows],
        "commit": _commit(),
        "machine": machine(),
    }
    found |= data
    (BUILD / f"{target}.json").write_text(json.dumps(found, indent=2) + "\n")


def machine() -> str:
    """The processor and how many of its cores are ours."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")]
        name = names[0].partition(":")[2].strip() if names else name
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
