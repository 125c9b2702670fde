"""A request as one page that needs nothing else: it opens from a file, without a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from importlib import resources
from typing import Any

from gateway.tracing.html_tokens import positions, table, tokens
from gateway.tracing.model import Request
from gateway.tracing.picture import picture
from gateway.tracing.strip import seconds
from gateway.tracing.words import RoundText

_KEY = (
    ("accepted", "accepted", ""),
    ("plain", "decided by the target", ""),
    ("rejected", "rejected", "drop"),
    ("draft", "proposal and its way", "arc"),
    ("queue", "not tested", ""),
)
_TOKEN_KEY = (
    ("accepted", "accepted draft token", ""),
    ("rejected", "in place of a rejected one", ""),
    ("line", "decided without a draft", ""),
)


def page(request: Request, texts: Sequence[RoundText]) -> str:
    """The page; texts are those of the rounds."""
    name = request.request_id or request.trace_id
    outcome = request.outcome.value + (f" · {request.detail}" if request.detail else "")
    f = request.figures
    label = (
        f"Waterfall: {f.steps} rounds in {seconds(request.seconds)},"
        f" {f.accepted} of {f.tested} draft tokens accepted. All rounds are in the table below."
    )
    when = datetime.fromtimestamp(request.began_at).astimezone().isoformat(" ", "seconds")
    parts = {
        "title": escape(f"{name} · Tandem"),
        "css": _resource("page.css"),
        "js": _resource("page.js") + _resource("act.js"),
        "data": _data(request),
        "request_id": escape(name),
        "outcome": request.outcome.value,
        "outcome_text": escape(outcome),
        "about": _about(request),
        "remarks": _remarks(request),
        "figures": _figures(request),
        "parts": _parts(request),
        "key": _key(_KEY),
        "token_key": _key(_TOKEN_KEY),
        "label": escape(label),
        "tokens": tokens(request, texts),
        "positions": positions(request),
        "table": table(request, texts),
        "footer": escape(f"Trace {request.trace_id} · began {when} · made by tandem trace"),
        "json": json.dumps(picture(request, texts)).replace("<", "\\u003c"),
    }
    text = _resource("page.html")
    pieces = text.split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:  # one pass: what is filled in is never looked at again
        key, _, rest = piece.partition("}}")
        filled += [parts[key], rest]
    return "".join(filled)


def _resource(name: str) -> str:
    return resources.files("gateway.tracing").joinpath("page", name).read_text("utf-8")


def _data(request: Request) -> str:
    """The figures for programs, as attributes of the page's main element."""
    f = request.figures
    told: Mapping[str, Any] = {
        "trace-id": request.trace_id,
        "request-id": request.request_id,
        "outcome": request.outcome.value,
        "complete": str(request.complete).lower(),
        "seconds": f"{request.seconds:.6f}",
        "tokens": f.tokens,
        "delivered": f.delivered,
        "discarded": f.discarded,
        "prompt": f.prompt,
        "steps": f.steps,
        "undrafted-steps": f.undrafted_steps,
        "drafted": f.drafted,
        "tested": f.tested,
        "accepted": f.accepted,
        "stale": f.stale,
    }
    return " ".join(f'data-{name}="{escape(str(value))}"' for name, value in told.items())


def _about(request: Request) -> str:
    words = [request.model, request.rule and f"{request.rule} rule"]
    if request.temperature is not None:
        words.append(f"temperature {request.temperature:g}")
    if request.lookahead:
        words.append(f"lookahead {request.lookahead}")
    if request.figures.prompt:
        words.append(f"prompt {request.figures.prompt} tokens, {request.figures.cached} cached")
    return "".join(f"<span>{escape(word)}</span>" for word in words if word)


def _remarks(request: Request) -> str:
    remarks = [f"Not here: {what}" for what in request.missing]
    remarks += [note[0].upper() + note[1:] for note in request.notes]
    if request.figures.summed:
        remarks.append(
            f"{request.figures.summed} rounds after the first {len(request.rounds)}"
            " are in the figures and not in the picture"
        )
    if not remarks:
        return ""
    items = "".join(f"<li>{escape(remark)}</li>" for remark in remarks)
    return f'<ul class="remarks">{items}</ul>'


def _figures(request: Request) -> str:
    f = request.figures

    def figure(name: str, value: str, unit: str = "", below: str = "") -> str:
        unit = f" <small>{unit}</small>" if unit else ""
        return f"<div><dt>{name}</dt><dd>{value}{unit}</dd><dd>{below or '&nbsp;'}</dd></div>"

    took, took_unit = seconds(request.seconds).split(" ")
    shown = [figure("Duration", took, took_unit)]
    if request.first_token is None:
        shown.append(figure("First token", "-"))
    else:
        shown.append(figure("First token", *seconds(request.first_token).split(" ")))
    discarded = f"{f.discarded} discarded" if f.discarded else "all delivered"
    shown.append(figure("Tokens", f"{f.tokens}", below=discarded))
    speed = request.tokens_per_second
    shown.append(figure("Speed", f"{speed:.1f}" if speed else "-", "tok/s"))
    per_step = f"{f.tokens / f.steps:.2f}" if f.steps else "-"
    undrafted = f"{f.steps} steps, {f.undrafted_steps} undrafted"
    shown.append(figure("Tokens per step", per_step, below=undrafted))
    rate = "-" if f.acceptance is None else f"{100 * f.acceptance:.0f}"
    below = f"{f.accepted} of {f.tested} tested, {f.stale} stale"
    shown.append(figure("Acceptance", rate, "%" if f.tested else "", below))
    return "".join(shown)


def _parts(request: Request) -> str:
    if not request.parts:
        return '<p class="empty">Told when the request has ended.</p>'
    total = max(request.seconds, sum(s for _, s in request.parts), 1e-9)
    bars, names = [], []
    for name, spent in request.parts:
        style = f'style="--c:var(--{name});flex:{max(spent / total, 1e-6):.6f}"'
        title = f"{name} {seconds(spent)}"
        bars.append(f'<span {style} title="{title}"></span>')
        names.append(
            f'<li style="--c:var(--{name})" data-part="{name}" data-seconds="{spent:.6f}">'
            f"<i></i>{name}<b>{seconds(spent)}<small>{spent / total:.1%}</small></b></li>"
        )
    rest = request.unexplained or 0.0
    if rest > 0:
        bars.append(f'<span class="rest" style="flex:{rest / total:.6f}"></span>')
    if abs(rest) > 0.005 * total:
        word = "not measured" if rest > 0 else "counted twice"
        names.append(
            f'<li class="rest"><i></i>{word}<b>{seconds(abs(rest))}'
            f"<small>{abs(rest) / total:.1%}</small></b></li>"
        )
    return f'<div class="bar">{"".join(bars)}</div><ul class="parts">{"".join(names)}</ul>'


def _key(entries: Sequence[tuple[str, str, str]]) -> str:
    return "".join(
        f'<span><i class="{shape}" style="--c:var(--{colour})"></i>{text}</span>'
        for colour, text, shape in entries
    )
