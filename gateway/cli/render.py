"""How answers and figures look in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.types import TokenOrigin, TopLogprobs
from gateway.types import (
    Delta,
    Explanation,
    Finished,
    GatewayStatus,
    PeerKind,
    PeerState,
    PeerStatus,
    Severity,
)

STYLES = {
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.RECOVERED: "red",
    TokenOrigin.BONUS: "",
}
SEVERITY_STYLES = {
    Severity.NOTE: "not bold",
    Severity.LIMIT: "bold yellow",
    Severity.FAULT: "bold red",
}
LEGEND = Text.assemble(
    ("accepted draft", STYLES[TokenOrigin.ACCEPTED]),
    ", ",
    ("in place of a rejected one", STYLES[TokenOrigin.RECOVERED]),
    ", decided without a draft",
)


def console() -> Console:
    """Standard output; wide tables stay whole in files and pipes."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=200)


def coloured(delta: Delta) -> Text:
    """A delta's text, every token in the colour of its origin."""
    text, begin = Text(), 0
    for end, origin in zip(delta.text_ends, delta.origins, strict=True):
        text.append(delta.text[begin:end], STYLES[origin])
        begin = end
    return text


def print_piece(console: Console, piece: Text) -> None:
    """Print without a line break, and without wrapping what is still growing."""
    console.print(piece, end="", soft_wrap=True, highlight=False)


def print_delta(console: Console, delta: Delta, show_drafts: bool) -> None:
    """Print a delta's text, in colours if drafts are to be shown."""
    print_piece(console, coloured(delta) if show_drafts else Text(delta.text))


def logprobs(deltas: Iterable[Delta]) -> Table:
    """A row for each token: its log probability, and the likeliest tokens at its place.

    Of those whose text is not known from the answer itself, the id is shown.
    """
    rows: list[tuple[str, float, TopLogprobs | None]] = []
    known: dict[int, str] = {}
    for delta in deltas:
        begin = 0
        tops = delta.top_logprobs or [None] * len(delta.token_ids)
        parts = zip(delta.token_ids, delta.text_ends, delta.logprobs, tops, strict=True)
        for token_id, end, logprob, top in parts:
            piece, begin = delta.text[begin:end], end
            known[token_id] = repr(piece) if piece else str(token_id)
            rows.append((known[token_id], logprob, top))
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("token")
    table.add_column("logprob", justify="right")
    table.add_column("likeliest")
    for name, logprob, top in rows:
        pairs = zip(top.token_ids, top.logprobs, strict=True) if top else ()
        likeliest = ", ".join(f"{known.get(i, i)} {value:.2f}" for i, value in pairs)
        table.add_row(Text(name), f"{logprob:.2f}", Text(likeliest))
    return table


def figures(rows: list[tuple[str, Finished]]) -> Table:
    """What generation cost, one row for each answer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("tokens", "tok/s", "steps", "tok/step", "tested", "accepted", "rejected"):
        table.add_column(name, justify="right")
    table.add_column("first token", justify="right")
    for name, finished in rows:
        spent, timing = finished.speculation, finished.timing
        decided = _decided(finished)
        table.add_row(
            name,
            str(finished.usage.delivered),
            f"{decided / max(timing.total_seconds, 1e-9):.1f}",
            str(spent.steps),
            f"{decided / max(spent.steps, 1):.2f}",
            str(spent.tested),
            str(spent.accepted),
            str(spent.tested - spent.accepted),
            f"{1000 * timing.time_to_first_token_seconds:.0f} ms",
        )
    return table


def stats(finished: Finished) -> Table:
    """All figures of one answer."""
    usage, spent, timing = finished.usage, finished.speculation, finished.timing
    stop = f" {finished.stop!r}" if finished.stop else ""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold")
    table.add_column()
    table.add_row("ended by", finished.reason.name.lower().replace("_", " ") + stop)
    table.add_row(
        "tokens",
        f"prompt {usage.prompt} ({usage.cached} cached),"
        f" delivered {usage.delivered}, discarded {usage.discarded}",
    )
    table.add_row(
        "steps",
        f"{spent.steps}, of them {spent.undrafted_steps} tested nothing;"
        f" {_decided(finished) / max(spent.steps, 1):.2f} tok/step",
    )
    table.add_row(
        "draft tokens",
        f"relayed {spent.drafted}, tested {spent.tested},"
        f" accepted {spent.accepted}, stale {spent.stale}",
    )
    by_place = [f"{_nth(i)} {n}" for i, n in enumerate(spent.accepted_per_position, 1)]
    table.add_row("accepted by place in the run", ", ".join(by_place) or "none")
    table.add_row(
        "seconds",
        f"total {timing.total_seconds:.2f},"
        f" to the first token {timing.time_to_first_token_seconds:.3f};"
        f" in the target: queue {timing.queue_seconds:.3f},"
        f" prefill {timing.prefill_seconds:.3f}, steps {timing.steps_seconds:.2f}",
    )
    return table


def _decided(finished: Finished) -> int:
    return finished.usage.delivered + finished.usage.discarded


def _nth(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else suffix}"


def explanation(e: Explanation) -> Text:
    """What bounded a request, and what would change it."""
    text = Text(f"request {e.request_id}\n", style="bold")
    for line in e.summary:
        text.append(f"  {line}\n", style="not bold")
    if not e.findings:
        text.append("nothing stands out", style="not bold")
    for i, f in enumerate(e.findings):
        text.append("\n" if i else "")
        text.append(f"{f.severity.name.lower()}: ", style=SEVERITY_STYLES[f.severity])
        text.append(f"{f.what}\n", style="not bold")
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in f.numbers)
        text.append(f"  {numbers}\n" if numbers else "", style="not bold dim")
        text.append(f"  to change it: {f.setting}", style="not bold")
    return text


def live_requests(number: int) -> str:
    """A count in words."""
    return f"{number} live request{'' if number == 1 else 's'}"


def status(state: GatewayStatus) -> Table:
    """The gateway's peers."""
    table = Table(
        title=f"gateway {state.version}, {live_requests(state.num_live_requests)}",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for name in ("peer", "address", "state", "model", "rows", "sequences", "round trip", "engine"):
        table.add_column(name)
    for peer in state.peers:
        table.add_row(*_peer_cells(peer))
    return table


def _peer_cells(peer: PeerStatus) -> tuple[str, ...]:
    state = peer.state.name.lower() + (f": {peer.detail}" if peer.detail else "")
    model, engine, trip = peer.model, peer.engine, peer.round_trip_seconds
    rows = "-"  # whether a pass over several rows rounds as one over a row does
    if model is not None and peer.kind is PeerKind.TARGET:
        rows = "invariant" if model.row_invariant else "may round"
    says = "idle" if peer.state is PeerState.READY else "-"
    if engine is not None:
        if engine.num_running or engine.num_waiting:
            says = f"{engine.num_running} running, {engine.num_waiting} waiting"
        if engine.num_blocks:
            says += f", {engine.num_free_blocks}/{engine.num_blocks} blocks free"
    return (
        peer.kind.name.lower(),
        peer.address,
        state,
        f"{model.name} {model.dtype}".strip() if model else "-",
        rows,
        str(peer.num_sequences),
        "-" if trip is None else f"{1000 * trip:.1f} ms",
        says,
    )
