"""The table of values in the chart's README, out of the comments of values.yaml.

`python -m helm.values_table` writes it. A value's meaning is the comment above it.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

CHART = Path(__file__).with_name("tandem")
README = CHART / "README.md"
BEGIN, END = "<!-- values: python -m helm.values_table -->", "<!-- end of values -->"
_KEY = re.compile(r"(?P<indent> *)(?P<name>[\w.-]+):(?: (?P<value>\S.*))?")


@dataclass(frozen=True)
class Row:
    """A value, or a group of values if it has no default of its own."""

    path: str
    default: str | None
    meaning: str


def rows(text: str) -> list[Row]:
    """Values and groups in the order of a values.yaml that has one key a line."""
    found: list[Row] = []
    path: list[str] = []
    comment: list[str] = []
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        if match := _KEY.fullmatch(line):
            del path[len(match["indent"]) // 2 :]
            path.append(match["name"])
            found.append(Row(".".join(path), match["value"], " ".join(comment)))
        elif stripped:
            raise ValueError(f'values.yaml has "{stripped}", must be one key a line')
        comment = []
    return found


def table() -> str:
    """As the README has it, between its marks."""
    lines = [BEGIN, "| value | default | meaning |", "|---|---|---|"]
    for row in rows((CHART / "values.yaml").read_text()):
        if row.default is not None:
            lines.append(f"| `{row.path}` | `{row.default}` | {row.meaning} |")
        elif row.meaning:
            lines.append(f"| **{row.path}** | | {row.meaning} |")
    return "\n".join([*lines, END])


def text() -> str:
    """The README with the table as it should be."""
    before, _, rest = README.read_text().partition(BEGIN)
    return before + table() + rest.partition(END)[2]


if __name__ == "__main__":
    README.write_text(text())
    sys.stdout.write(f"{README} written\n")
