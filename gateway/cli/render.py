"""How answers and figures look in a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from common.types import TokenOrigin
from gateway.types import Delta, Explanation, Finished, GatewayStatus, PeerStatus, Severity

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


def figures(rows: list[tuple[str, Finished]]) -> Table:
    """What generation cost, one row for each answer."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for name in ("tokens", "tok/s", "steps", "tok/step", "tested", "accepted", "rejected", "first"):
        table.add_column(name, justify="right")
    for name, finished in rows:
        spent, timing = finished.speculation, finished.timing
        decided = finished.usage.delivered + finished.usage.discarded
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
    table.add_row("steps", f"{spent.steps}, of them {spent.undrafted_steps} tested nothing")
    table.add_row(
        "draft tokens",
        f"relayed {spent.drafted}, tested {spent.tested},"
        f" accepted {spent.accepted}, stale {spent.stale}",
    )
    table.add_row("accepted at place", " ".join(map(str, spent.accepted_per_position)) or "-")
    table.add_row(
        "seconds",
        f"total {timing.total_seconds:.2f},"
        f" to the first token {timing.time_to_first_token_seconds:.3f};"
        f" in the target: queue {timing.queue_seconds:.3f},"
        f" prefill {timing.prefill_seconds:.3f}, steps {timing.steps_seconds:.2f}",
    )
    return table


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


def status(state: GatewayStatus) -> Table:
    """The gateway's peers."""
    table = Table(
        title=f"gateway {state.version}, {state.num_live_requests} live requests",
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    for name in ("peer", "address", "state", "model", "sequences", "round trip", "engine"):
        table.add_column(name)
    for peer in state.peers:
        table.add_row(*_peer_cells(peer))
    return table


def _peer_cells(peer: PeerStatus) -> tuple[str, ...]:
    state = peer.state.name.lower() + (f": {peer.detail}" if peer.detail else "")
    model, engine, trip = peer.model, peer.engine, peer.round_trip_seconds
    says = "-"
    if engine is not None:
        says = f"{engine.num_running} running, {engine.num_waiting} waiting"
        if engine.num_blocks:
            says += f", {engine.num_free_blocks}/{engine.num_blocks} blocks free"
    return (
        peer.kind.name.lower(),
        peer.address,
        state,
        f"{model.name} {model.dtype}".strip() if model else "-",
        str(peer.num_sequences),
        "-" if trip is None else f"{1000 * trip:.1f} ms",
        says,
    )
