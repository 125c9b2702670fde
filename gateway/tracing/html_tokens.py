"""The parts of the page that hold tokens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from common.types import TokenOrigin
from gateway.tracing.model import Request
from gateway.tracing.strip import seconds, visible
from gateway.tracing.words import RoundText

KINDS = {
    TokenOrigin.ACCEPTED: "accepted",
    TokenOrigin.RECOVERED: "recovered",
    TokenOrigin.BONUS: "bonus",
}


def tokens(request: Request, texts: Sequence[RoundText]) -> str:
    """Every token in the colour of its origin."""
    spans = []
    for r, text in zip(request.rounds, texts, strict=True):
        pieces = [
            _token(t, KINDS[token.origin], r.index, f'data-token="{token.token_id}"')
            for t, token in zip(text.tokens, r.tokens, strict=True)
        ]
        rejected = [_token(t, "rejected", r.index, "") for t in text.rejected]
        spans += [*pieces[: r.num_accepted], *rejected, *pieces[r.num_accepted :]]
    hidden = request.figures.tokens - len(request.tokens)
    if hidden > 0:
        spans.append(f'<span class="empty"> … and {hidden} more without a span</span>')
    return "".join(spans) or '<span class="empty">No token yet.</span>'


def _token(text: str, kind: str, index: int, data: str) -> str:
    shown = escape(visible(text) if kind == "rejected" else text)
    shown = shown.replace("\n", '<span class="nl">↵</span>\n')
    return f'<span class="t {kind}" data-round="{index}" {data}>{shown}</span>'


def positions(request: Request) -> str:
    """How often the first, second, ... token of a proposal was accepted."""
    if not request.per_position:
        return ""
    items = []
    for place, (tested, accepted) in enumerate(request.per_position[:8], 1):
        share = accepted / tested
        items.append(
            f'<li title="{accepted} of {tested}"><b>{share:.0%}</b><div class="col">'
            f'<span style="height:{100 * share:.0f}%"></span></div>{place}</li>'
        )
    title = '<h2 id="h-places">Accepted by place in the proposal</h2>'
    return (
        f'<section aria-labelledby="h-places">{title}'
        f'<ul class="card positions">{"".join(items)}</ul></section>'
    )


def table(request: Request, texts: Sequence[RoundText]) -> str:
    """Every round as a row: for readers without the picture."""
    names = ("round", "began", "took", "proposal", "tested", "accepted", "decided and rejected")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = []
    for r, text in zip(request.rounds, texts, strict=True):
        words = [
            f'<span class="{KINDS[token.origin]}">{escape(visible(t))}</span>'
            for t, token in zip(text.tokens, r.tokens, strict=True)
        ]
        words[r.num_accepted : r.num_accepted] = [
            f"<del>{escape(visible(t))}</del>" for t in text.rejected
        ]
        cells = (
            f"{r.index + 1}",
            seconds(r.bar.begin),
            seconds(r.bar.seconds),
            ", ".join(str(i + 1) for i in r.chains) or "-",
            f"{r.num_tested}",
            f"{r.num_accepted}",
            "".join(words),
        )
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    body = "".join(rows)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )
