"""The whole request on three lanes, however long it was."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from gateway.tracing.model import Request, Round
from gateway.tracing.strip import Strip, axis

LABEL = 10
HEIGHTS = "▁▂▃▄▅▆▇█"
ACCEPTED, REJECTED, UNDRAFTED, DRAFT = "green", "red", "cyan", "blue"


def overview(request: Request, width: int, shown: Sequence[Round]) -> Text:
    """Gateway, targets and drafts over time; what is shown in detail is bracketed below."""
    size = width - LABEL - 1
    end = max(request.seconds, 1e-6)
    rows = [_row("", axis(size, 0.0, end, "dim"))]
    gateway = Strip(size, 0.0, end)
    gateway.line(0.0, end, "─", "dim")
    gateway.mark(0.0, "├", "dim")
    gateway.mark(end, "┤", "dim")
    if request.first_token is not None:
        gateway.mark(request.first_token, "▼", "bold")
    rows.append(_row("gateway", gateway.text()))
    rows += [_row(*lane) for lane in _targets(request, size, end)]
    rows += [_row(*lane) for lane in _drafts(request, size, end)]
    if shown and len(shown) < len(request.rounds):
        window = Strip(size, 0.0, end)
        begin, last = shown[0].bar.begin, shown[-1].bar.end
        window.line(begin, last, "─", "dim")
        window.mark(last, "╯", "dim")
        window.mark(begin, "╰", "dim")
        rows.append(_row("", window.text()))
    return Text("\n").join(rows)


def _row(label: str, strip: Text) -> Text:
    return Text.assemble((f" {label:<{LABEL}}", "dim"), strip)


def _targets(request: Request, size: int, end: float) -> list[tuple[str, Text]]:
    """Queue, prompt, then for every column the tokens a step decided there."""
    lanes = []
    most = max((len(r.tokens) for r in request.rounds), default=1)
    for target in request.targets:
        strip = Strip(size, 0.0, end)
        if target.sequence:
            strip.line(target.sequence.begin, target.sequence.end, "·", "dim")
            if target.prefill:
                strip.line(target.sequence.begin, target.prefill.begin, "░", "bright_black")
        if target.prefill:
            strip.line(target.prefill.begin, target.prefill.end, "▒", "magenta")
        columns: dict[int, list[Round]] = {}
        for r in request.rounds:
            if r.target != target.index:
                continue
            first = max(0, int(strip.place(r.bar.begin) + 0.5))
            last = max(first + 1, int(strip.place(r.bar.end) + 0.5))
            for column in range(first, min(last, size)):
                columns.setdefault(column, []).append(r)
        for column, rounds in columns.items():
            strip.cells[column] = _cell(rounds, most)
        name = "target" if len(request.targets) == 1 else f"target {target.index + 1}"
        lanes.append((name, strip.text()))
    return lanes


def _cell(rounds: Sequence[Round], most: int) -> tuple[str, str]:
    tokens = sum(len(r.tokens) for r in rounds) / len(rounds)
    height = HEIGHTS[min(7, max(1, round(8 * tokens / max(most, 2)) - 1))]
    tested = sum(r.num_tested for r in rounds)
    accepted = sum(r.num_accepted for r in rounds)
    return height, UNDRAFTED if not tested else ACCEPTED if 2 * accepted >= tested else REJECTED


def _drafts(request: Request, size: int, end: float) -> list[tuple[str, Text]]:
    lanes = []
    for draft in request.drafts:
        strip = Strip(size, 0.0, end)
        if open_ := draft.sequence or draft.session:
            strip.line(open_.begin, open_.end, "·", "dim")
        if draft.prefill:
            strip.line(draft.prefill.begin, draft.prefill.end, "▒", "magenta")
        for chain in request.chains:
            if chain.draft == draft.index:
                style = DRAFT if chain.consumed_by else "bright_black"
                strip.line(chain.bar.begin, chain.bar.end, "━", style)
        if draft.lost and draft.session:
            strip.mark(draft.session.end, "✗", "red")
        name = "draft" if len(request.drafts) == 1 else f"draft {draft.index + 1}"
        lanes.append((name, strip.text()))
    return lanes
