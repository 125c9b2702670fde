"""Bars on a row of characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text


def seconds(value: float) -> str:
    """A duration as people read it."""
    if abs(value) < 0.00995:
        return f"{1000 * value:.1f} ms"
    if abs(value) < 0.9995:
        return f"{1000 * value:.0f} ms"
    return f"{value:.2f} s" if abs(value) < 99.5 else f"{value:.0f} s"


def visible(text: str) -> str:
    """A token's text on one line, its spaces to be seen."""
    text = text.replace(" ", "·").replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍")
    return "".join(c if c.isprintable() else "�" for c in text)


@dataclass
class Strip:
    """A row of `width` characters for the time from begin to end."""

    width: int
    begin: float
    end: float
    cells: list[tuple[str, str]] = field(init=False)  # character and style

    def __post_init__(self) -> None:
        self.cells = [(" ", "")] * self.width

    def place(self, at: float) -> float:
        """Where a time is, in characters."""
        return (at - self.begin) / max(self.end - self.begin, 1e-9) * self.width

    def line(self, begin: float, end: float, char: str, style: str) -> None:
        """A thin line over the cells that a time touches, at least one."""
        first = int(self.place(begin) + 0.5)
        last = max(int(self.place(end) + 0.5), first + 1)
        for i in range(max(0, first), min(self.width, last)):
            self.cells[i] = (char, style)

    def bar(self, begin: float, end: float, styles: Sequence[str]) -> None:
        """A solid bar in so many equal parts; begins and ends on half characters."""
        left, right = round(2 * self.place(begin)), round(2 * self.place(end))
        right = max(right, left + 1)
        for i in range(max(0, left // 2), min(self.width, (right + 1) // 2)):
            has_left, has_right = left <= 2 * i, right >= 2 * i + 2
            char = "█" if has_left and has_right else "▌" if has_left else "▐"
            part = (2 * i + 1 - left) * len(styles) // (right - left)
            self.cells[i] = (char, styles[max(0, min(part, len(styles) - 1))])

    def mark(self, at: float, char: str, style: str) -> None:
        """One character at a time."""
        i = min(self.width - 1, max(0, int(self.place(at))))
        self.cells[i] = (char, style)

    def text(self) -> Text:
        """The row."""
        row = Text()
        for style, run in groupby(self.cells, key=lambda cell: cell[1]):
            row.append("".join(char for char, _ in run), style)
        return row


def axis(width: int, begin: float, end: float, style: str) -> Text:
    """Round times over a strip of that width."""
    strip = Strip(width, begin, end)
    for at in ticks(begin, end, max(2, width // 12)):
        label = tick_label(at, begin, end)
        first = int(strip.place(at) + 0.5)
        if first + len(label) + 1 <= width:
            for i, char in enumerate("╷" + label):
                strip.cells[first + i] = (char, style)
    return strip.text()


def tick_label(at: float, begin: float, end: float) -> str:
    """A time on an axis from begin to end; its unit is the same all along."""
    span = end - begin
    if end < 1.0:
        return f"{1000 * at:.0f} ms" if span >= 0.01 else f"{1000 * at:.1f} ms"
    return f"{at:.2f} s" if span < 2.0 else f"{at:.1f} s" if span < 20 else f"{at:.0f} s"


def ticks(begin: float, end: float, most: int) -> Iterable[float]:
    """Round times from begin to end, at most so many."""
    span = max(end - begin, 1e-9)
    step = 1e-6
    while span / step > most:
        for factor in (2, 2.5, 2):  # 1, 2, 5, 10
            step *= factor
            if span / step <= most:
                break
    number = -(-begin // step)
    while number * step <= end:
        yield number * step
        number += 1
