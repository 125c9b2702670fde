"""Which spans make an attempt at a peer, and which ones have not arrived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from common import attributes as registry
from gateway.tracing.model import Round
from gateway.tracing.spans import Span

CLOCK_SLACK_SECONDS = 0.001  # a service on the gateway's own clock is not corrected


@dataclass
class Peer:
    """One attempt: the gateway's session, the peer's sequence and what lies below it."""

    session: Span | None
    sequence: Span | None
    spans: list[Span] = field(default_factory=list)

    @property
    def begin(self) -> int:
        """When the first of its spans began."""
        own = (self.session, self.sequence, *self.spans)
        return min(span.begin for span in own if span is not None)

    @property
    def lost(self) -> bool:
        """Whether the gateway has lost the peer: its spans will not come."""
        names = ("tandem.draft_lost", "tandem.target_lost")
        return self.session is not None and any(map(self.session.has_event, names))

    @property
    def shift(self) -> int:
        """Nanoseconds that put the sequence where it must have been: within its session."""
        session, sequence = self.session, self.sequence
        if session is None or sequence is None:
            return 0
        early = session.begin - sequence.begin
        slack = max(0, (session.end - session.begin) - (sequence.end - sequence.begin))
        if early > CLOCK_SLACK_SECONDS * 1e9 or sequence.begin > session.end:
            return early + slack // 2
        return 0


def is_root(span: Span) -> bool:
    """Whether it is the gateway's span of a client's request."""
    return span.service == "gateway" and "/" in span.name


def by_root(spans: Iterable[Span]) -> list[list[Span]]:
    """The spans below every root, and those whose root has not arrived, if there are any."""
    by_id = {span.span_id: span for span in spans}
    groups: dict[str, list[Span]] = {}
    for span in by_id.values():
        top = span
        while not is_root(top) and top.parent_id in by_id:
            top = by_id[top.parent_id]
        groups.setdefault(top.span_id if is_root(top) else "", []).append(span)
    return sorted(groups.values(), key=lambda group: min(s.begin for s in group))


def group(spans: Iterable[Span], kind: str) -> list[Peer]:
    """The attempts at targets or drafts, by time."""
    spans = list(spans)
    sessions = [s for s in spans if s.name == f"{kind}.session"]
    sequences = [s for s in spans if s.name == f"{kind}.sequence"]
    children: dict[str, list[Span]] = {}
    for span in spans:
        if span.service == kind and span.name != f"{kind}.sequence":
            children.setdefault(span.parent_id, []).append(span)
    by_parent = {s.parent_id: s for s in sequences}
    peers = [Peer(session, by_parent.pop(session.span_id, None)) for session in sessions]
    peers += [Peer(None, sequence) for sequence in by_parent.values()]
    for peer in peers:
        if peer.sequence:
            peer.spans = children.pop(peer.sequence.span_id, [])
    # What is left belongs to sequences that are open still: spans come when they end.
    peers += [Peer(None, None, below) for below in children.values()]
    return sorted(peers, key=lambda peer: peer.begin)


def missing(
    root: Span | None, peers: Mapping[str, Sequence[Peer]], num_rounds: int
) -> Iterable[str]:
    """What must be somewhere and is not here, in words."""
    if root is None:
        yield "the gateway's root span"
    for kind, attempts in peers.items():
        absent = sum(p.sequence is None and p.session is not None and not p.lost for p in attempts)
        if absent:
            yield _many(absent, f"{kind}.sequence")
        strays = sum(p.session is None for p in attempts)
        if strays:
            yield _many(strays, f"{kind}.session")
    expected = sum(
        peer.sequence.count(registry.NUM_STEPS) - peer.sequence.count(registry.SUMMED)
        for peer in peers["target"]
        if peer.sequence
    )
    if num_rounds < expected:
        yield f"{_many(expected - num_rounds, 'round')} of {expected}"


def notes(peers: Mapping[str, Sequence[Peer]], rounds: Sequence[Round]) -> Iterable[str]:
    """What a reader of the picture should know."""
    for kind, attempts in peers.items():
        for peer in attempts:
            if peer.lost:
                yield f"a {kind} was lost on the way"
            if peer.shift:
                side = "behind" if peer.shift > 0 else "ahead"
                shown = f"{abs(peer.shift) / 1e6:.1f} ms"
                yield f"the {kind}'s clock is {shown} {side}; its lane is moved"
    unresolved = sum(r.num_unresolved for r in rounds)
    if unresolved:
        yield f"{_many(unresolved, 'link')} to proposals that are not here"


def _many(count: int, what: str) -> str:
    return f"{count} {what}" + ("s" if count > 1 else "")
