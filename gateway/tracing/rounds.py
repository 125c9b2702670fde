"""Rounds one by one: the guess, its way, the step that tested it, and the tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from common.types import TokenOrigin
from gateway.tracing.lanes import ACCEPTED, DRAFT, REJECTED, UNDRAFTED
from gateway.tracing.model import Chain, Request, Round
from gateway.tracing.strip import Strip, axis, seconds, visible
from gateway.tracing.words import RoundText

LABEL = 17
MAX_UNUSED = 6
TOKEN_STYLES = {
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.RECOVERED: "bold",
    TokenOrigin.BONUS: "",
}
LEGEND = Text.assemble(
    (" ━", DRAFT),
    (" draft guesses ", "dim"),
    ("┄", DRAFT),
    (" on its way, waiting ", "dim"),
    ("█", UNDRAFTED),
    (" a step decides  ", "dim"),
    ("accepted", TOKEN_STYLES[TokenOrigin.ACCEPTED]),
    ("  ", ""),
    ("rejected", f"{REJECTED} strike"),
    ("  ", ""),
    ("in its place", TOKEN_STYLES[TokenOrigin.RECOVERED]),
)


def table(request: Request, texts: Sequence[RoundText], shown: Sequence[Round], width: int) -> Text:
    """A line for each round, and one for each guess within that time that nobody tested."""
    begin, end = _times(request, shown)
    size = max(20, (width - LABEL - 2) * 11 // 20)
    rows = [Text(" " * LABEL).append_text(axis(size, begin, end, "dim"))]
    room = width - LABEL - size - 2
    lines: list[tuple[float, Text]] = []
    for r in shown:
        used = [request.chains[i] for i in r.chains]
        strip = _strip(r, used, size, begin, end)
        label = (_label(r).ljust(LABEL), "dim")
        line = Text.assemble(label, strip, "  ", _tokens(r, texts[r.index], room))
        lines.append((r.bar.begin, line))
    unused = [c for c in request.chains if not c.consumed_by and begin <= c.bar.begin < end]
    for chain in unused[:MAX_UNUSED]:
        idle = Strip(size, begin, end)
        idle.line(chain.bar.begin, chain.bar.end, "━", "bright_black")
        label = (f"   unused p{chain.index + 1}".ljust(LABEL), "dim")
        told = (f"  {chain.num_tokens} guessed, not tested", "dim")
        line = Text.assemble(label, idle.text(), told)
        lines.append((chain.bar.end, line))
    rows += [line for _, line in sorted(lines, key=lambda pair: pair[0])]
    if len(unused) > MAX_UNUSED:
        rows.append(Text(f"   {len(unused) - MAX_UNUSED} more guesses were not tested", "dim"))
    return Text("\n").join(rows)


def _times(request: Request, shown: Sequence[Round]) -> tuple[float, float]:
    """From the first guess that these rounds consumed to their end."""
    begins = [shown[0].bar.begin]
    begins += [request.chains[i].bar.begin for r in shown[:2] for i in r.chains]
    end = max(r.bar.end for r in shown)
    widest = (end - shown[0].bar.begin) / 4  # a long chain may have begun long before
    return max(min(begins), shown[0].bar.begin - widest, 0.0), end


def _label(r: Round) -> str:
    used = "+".join(f"p{i + 1}" for i in r.chains[-2:]) or ("p?" if r.num_unresolved else "")
    took = seconds(r.bar.seconds).replace(" ms", "ms").replace(" s", "s")
    return f"{r.index + 1:>4} {took:>5} {'◂' + used if used else ''}"


def _strip(r: Round, used: Sequence[Chain], size: int, begin: float, end: float) -> Text:
    strip = Strip(size, begin, end)
    for chain in used:
        last = min(chain.bar.end, r.bar.begin)
        strip.line(last, r.bar.begin, "┄", DRAFT)
        strip.line(min(chain.bar.begin, last), last, "━", DRAFT)
    styles = [ACCEPTED] * r.num_accepted + [REJECTED] * (r.num_tested - r.num_accepted)
    styles += [UNDRAFTED] * (len(r.tokens) - r.num_accepted)
    strip.bar(r.bar.begin, r.bar.end, styles or [UNDRAFTED])
    return strip.text()


def _tokens(r: Round, text: RoundText, room: int) -> Text:
    """Accepted, rejected and recovered tokens in the order of their positions."""
    line = Text(no_wrap=True)
    if r.chains or r.num_tested:
        line.append(f"{r.num_accepted}/{r.num_tested} ", "dim")
    pieces = [
        (visible(t), TOKEN_STYLES[token.origin])
        for t, token in zip(text.tokens, r.tokens, strict=True)
    ]
    rejects = [(visible(t), f"{REJECTED} strike") for t in text.rejected]
    for piece, style in (*pieces[: r.num_accepted], *rejects, *pieces[r.num_accepted :]):
        line.append(piece, style).append(" ")
    line.rstrip()
    line.truncate(max(room, 8), overflow="ellipsis")
    return line
