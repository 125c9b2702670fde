"""A request in the terminal: figures, where the time went, lanes, and rounds one by one."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from gateway.tracing.lanes import overview
from gateway.tracing.model import Outcome, Request, busiest
from gateway.tracing.rounds import LEGEND, table
from gateway.tracing.strip import seconds
from gateway.tracing.words import RoundText

MAX_ROUNDS = 16
PART_STYLES = {
    "queue": "bright_black",
    "prefill": "magenta",
    "steps": "cyan",
    "wire": "yellow",
    "gateway": "blue",
}
OUTCOME_STYLES = {
    Outcome.RUNNING: "yellow",
    Outcome.FINISHED: "green",
    Outcome.CANCELLED: "yellow",
    Outcome.DEADLINE: "red",
    Outcome.FAILED: "red",
}
_LIST = (
    ("request", 22),
    ("state", 10),
    ("time", 8),
    ("first", 8),
    ("tokens", 7),
    ("tok/s", 7),
    ("tok/step", 9),
    ("accepted", 15),
)


def waterfall(
    request: Request,
    texts: Sequence[RoundText],
    width: int,
    chosen: slice | None = None,
    hint: str = "--html FILE writes all",
) -> RenderableType:
    """The whole picture of one request; `chosen` rounds in detail, or the busiest ones."""
    width = max(60, min(width, 160))
    window = chosen or busiest(request.rounds, MAX_ROUNDS)
    shown = request.rounds[window]
    rows: list[RenderableType] = [_title(request), _counts(request), Text()]
    rows += [_parts(request, width), Text(), overview(request, width, shown)]
    if shown:
        title = Text(" rounds", "bold")
        if len(shown) < len(request.rounds):
            title = Text(f" rounds {shown[0].index + 1} to {shown[-1].index + 1}", "bold")
            of = request.figures.steps or len(request.rounds)
            why = "" if chosen else "where most was drafted; "
            title.append(f" of {of}: {why}{hint}", "dim not bold")
        rows += [Text(), title, table(request, texts, shown, width), Text(), LEGEND]
    rows += [Text(f" {note}", "yellow") for note in _remarks(request)]
    return Group(*rows)


def _title(request: Request) -> Text:
    outcome = request.outcome.value + (f", {request.detail}" if request.detail else "")
    title = Text(" ")
    title.append(request.request_id or f"trace {request.trace_id}", "bold")
    title.append(f"  {outcome}", OUTCOME_STYLES[request.outcome])
    about = [request.model, request.rule]
    if request.temperature is not None:
        about.append(f"temperature {request.temperature:g}")
    if request.lookahead:
        about.append(f"lookahead {request.lookahead}")
    if request.figures.prompt:
        about.append(f"prompt {request.figures.prompt}")
    title.append("  " + " · ".join(filter(None, about)), "dim")
    title.overflow, title.no_wrap = "ellipsis", True
    return title


def _counts(request: Request) -> Text:
    f = request.figures
    words: list[tuple[str, str]] = [(seconds(request.seconds), "s")]
    words.append((f"{f.tokens}", "tokens"))
    if request.tokens_per_second:
        words.append((f"{request.tokens_per_second:.1f}", "tok/s"))
    if request.first_token is not None:
        words.append((seconds(request.first_token), "first"))
    if f.steps:
        words.append((f"{f.tokens / f.steps:.2f}", f"tok/step in {f.steps}"))
    if f.acceptance is not None:
        words.append((f"{f.accepted}/{f.tested}", f"accepted {f.acceptance:.0%}"))
    if f.stale:
        words.append((f"{f.stale}", "stale"))
    if f.discarded:
        words.append((f"{f.discarded}", "discarded"))
    line = Text(" ")
    for number, unit in words:
        line.append(number, "bold")
        line.append(f" {unit}  " if unit != "s" else "  ", "dim")
    line.rstrip()
    line.overflow, line.no_wrap = "ellipsis", True
    return line


def _parts(request: Request, width: int) -> Text:
    """One bar, its parts as long as they took, and their names below."""
    if not request.parts:
        return Text(" where the time went is told when the request has ended", "dim")
    total = max(request.seconds, sum(s for _, s in request.parts), 1e-9)
    size = width - 2
    bar, names, done, drawn = Text(" "), Text(" "), 0.0, 0
    for name, spent in request.parts:
        done += spent
        end = round(done / total * size)
        bar.append("█" * (end - drawn), PART_STYLES[name])
        drawn = end
        names.append("■ ", PART_STYLES[name])
        names.append(f"{name} ")
        names.append(seconds(spent), "bold")
        names.append(f" {spent / total:.0%}  " if 20 * spent > total else "  ", "dim")
    bar.append("░" * (size - drawn), "bright_black")
    rest = request.unexplained
    if rest is not None and abs(rest) > 0.01 * total:
        names.append(f"░ {'not measured' if rest > 0 else 'counted twice'} ", "bright_black")
        names.append(seconds(abs(rest)), "dim")
    names.rstrip()
    return Text("\n", no_wrap=True, overflow="ellipsis").join((bar, names))


def _remarks(request: Request) -> list[str]:
    remarks = [f"not here: {what}" for what in request.missing]
    remarks += request.notes
    if request.figures.summed:
        known = len(request.rounds)
        remarks.append(f"{request.figures.summed} rounds after the first {known} are in the sums")
    return remarks


def listing_header() -> Text:
    """Names of the columns of `listing`."""
    head = Text("    # ")
    for name, width in _LIST:
        head.append(name.ljust(width) if name == "request" else name.rjust(width))
    head.stylize("bold")
    return head


def listing(number: int, request: Request) -> Text:
    """One request as a line of the live list."""
    f = request.figures
    name = request.request_id or request.trace_id
    size = _LIST[0][1] - 1
    row = Text()
    row.append(f"{number:>5} ", "dim")
    row.append((name if len(name) <= size else name[: size - 1] + "…").ljust(size + 1), "bold")
    partial = request.missing and request.outcome is Outcome.FINISHED
    state, style = request.outcome.value, OUTCOME_STYLES[request.outcome]
    row.append(("partial" if partial else state).rjust(_LIST[1][1]), "yellow" if partial else style)
    accepted = "-" if f.acceptance is None else f"{f.accepted}/{f.tested} {f.acceptance:>4.0%}"
    first, speed = request.first_token, request.tokens_per_second
    cells = (
        seconds(request.seconds),
        "-" if first is None else seconds(first),
        f"{f.tokens}",
        f"{speed:.1f}" if speed else "-",
        f"{f.tokens / f.steps:.2f}" if f.steps else "-",
        accepted,
    )
    for cell, (_, width) in zip(cells, _LIST[2:], strict=True):
        row.append(cell.rjust(width))
    row.no_wrap, row.overflow = True, "ellipsis"
    return row
