"""Lines over a logarithmic axis, as PNG; matplotlib is an extra: `pip install -e '.[bench]'`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.benchmarks.harness import BUILD


@dataclass(frozen=True)
class Line:
    """Medians, perhaps with the range behind each."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    style: str = "-o"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: list[Line] = field(default_factory=list)
    log_x: bool = True
    log_y: bool = False


def draw(name: str, panels: Sequence[Panel]) -> str:
    """Write `build/NAME.png`; returns one line that says so, or why not."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture: pip install -e '.[bench]'"
    figure = Figure(figsize=(6.4 * len(panels), 4.8), layout="constrained")
    for panel, axes in zip(panels, figure.subplots(1, len(panels), squeeze=False)[0], strict=True):
        for line in panel.lines:
            (drawn,) = axes.plot(line.x, line.y, line.style, label=line.label, markersize=3)
            if line.low:
                axes.fill_between(line.x, line.low, line.high, alpha=0.2, color=drawn.get_color())
        if panel.log_x:
            ticks = sorted({x for line in panel.lines for x in line.x})
            axes.set_xscale("log")
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
        if panel.log_y:
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set(title=panel.title, xlabel=panel.x_label, ylabel=panel.y_label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    BUILD.mkdir(exist_ok=True)
    path = BUILD / f"{name}.png"
    figure.savefig(path, dpi=110)
    return f"picture: {path}"
