"""From the spans of a trace to a `Request`. Spans may be missing; what is there is shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from common import attributes as registry
from common.types import Verdict
from gateway.tracing.attempts import Peer, by_root, group, is_root, missing, notes
from gateway.tracing.model import (
    PARTS,
    Attempt,
    Bar,
    Chain,
    Figures,
    Outcome,
    Request,
    Round,
    Token,
)
from gateway.tracing.spans import Span

_ABSENT = Span("", "", "", "", "", 0, 0)
_PARTS = dict(
    zip(
        PARTS,
        (registry.QUEUE, registry.PREFILL, registry.STEPS, registry.WIRE, registry.GATEWAY),
        strict=True,
    )
)


def requests(trace_id: str, spans: Iterable[Span]) -> list[Request]:
    """All requests of a trace: a client may send several under one traceparent."""
    return [read(trace_id, group) for group in by_root(spans)]


def read(trace_id: str, spans: Iterable[Span]) -> Request:
    """The one request that spans tell of, in any order."""
    return _Reader(trace_id, sorted(spans, key=lambda s: (s.begin, s.span_id))).request()


class _Reader:
    def __init__(self, trace_id: str, spans: list[Span]) -> None:
        self._trace_id = trace_id
        self._spans = spans
        self._by_id = {s.span_id: s for s in spans}
        self._root = next(filter(is_root, spans), None)
        self._origin = self._root.begin if self._root else min((s.begin for s in spans), default=0)
        self._targets = group(spans, "target")
        self._drafts = group(spans, "draft")
        self._peers = {"target": self._targets, "draft": self._drafts}
        self._chain_of = self._index(self._drafts, "draft.propose")
        self._round_of = self._index(self._targets, "target.verify")

    def request(self) -> Request:
        root = self._root or _ABSENT
        chains = self._chains()
        rounds = self._rounds(chains)
        end = self._root.end if self._root else max((s.end for s in self._spans), default=0)
        first = next((e.at for e in root.events if e.name == "tandem.first_token"), None)
        outcome, detail = _outcome(self._root)
        temperature = root.attributes.get("gen_ai.request.temperature")
        models = (root.attributes.get(f"gen_ai.{side}.model") for side in ("response", "request"))
        return Request(
            trace_id=self._trace_id,
            request_id=root.text(registry.REQUEST_ID),
            name=root.name.rpartition("/")[2],
            model=next((str(model) for model in models if model), ""),
            rule=root.text(registry.RULE),
            lookahead=root.number(registry.LOOKAHEAD),
            temperature=temperature if isinstance(temperature, float) else None,
            outcome=outcome,
            detail=detail,
            began_at=self._origin / 1e9,
            seconds=(end - self._origin) / 1e9,
            first_token=None if first is None else (first - self._origin) / 1e9,
            figures=self._figures(rounds),
            parts=self._parts(),
            targets=tuple(self._attempt(i, p) for i, p in enumerate(self._targets)),
            drafts=tuple(self._attempt(i, p) for i, p in enumerate(self._drafts)),
            rounds=rounds,
            chains=chains,
            missing=tuple(missing(self._root, self._peers, len(rounds))),
            notes=tuple(notes(self._peers, rounds)),
            per_position=_per_position(rounds),
        )

    def _index(self, peers: Sequence[Peer], name: str) -> dict[str, int]:
        found = [(s.begin + p.shift, s.span_id) for p in peers for s in p.spans if s.name == name]
        return {span_id: i for i, (_, span_id) in enumerate(sorted(found))}

    def _bar(self, span: Span, shift: int = 0) -> Bar:
        begin, end = (t + shift - self._origin for t in (span.begin, span.end))
        return Bar(begin / 1e9, end / 1e9, span.span_id)

    def _chains(self) -> tuple[Chain, ...]:
        consumers: dict[str, list[int]] = {}
        for round_id, index in self._round_of.items():
            for linked in self._by_id[round_id].links:
                consumers.setdefault(linked, []).append(index)
        made = []
        for number, peer in enumerate(self._drafts):
            for span in peer.spans:
                if span.span_id not in self._chain_of:
                    continue
                causes = [self._round_of[i] for i in span.links if i in self._round_of]
                token_ids = span.ids(registry.TOKEN_IDS)
                made.append(
                    Chain(
                        bar=self._bar(span, peer.shift),
                        index=self._chain_of[span.span_id],
                        draft=number,
                        serial=span.count(registry.CHAIN_SERIAL),
                        base_len=span.count(registry.BASE_LEN),
                        start=span.count(registry.START),
                        token_ids=token_ids,
                        num_tokens=span.count(registry.NUM_TOKENS) or len(token_ids),
                        held_seconds=span.seconds(registry.HELD),
                        cause=causes[0] if causes else None,
                        consumed_by=tuple(sorted(consumers.get(span.span_id, ()))),
                    )
                )
        return tuple(sorted(made, key=lambda c: c.index))

    def _rounds(self, chains: Sequence[Chain]) -> tuple[Round, ...]:
        spans = {
            self._round_of[s.span_id]: (s, number, peer.shift)
            for number, peer in enumerate(self._targets)
            for s in peer.spans
            if s.span_id in self._round_of
        }
        rounds: list[Round] = []
        num_tokens = 0
        for index in range(len(spans)):
            span, number, shift = spans[index]
            consumed = sorted(self._chain_of[i] for i in span.links if i in self._chain_of)
            made = _round(span, index, num_tokens, [chains[i] for i in consumed])
            num_tokens += len(made[0])
            rounds.append(
                Round(
                    bar=self._bar(span, shift),
                    index=index,
                    target=number,
                    step_id=span.count(registry.STEP_ID),
                    batch_size=span.count(registry.BATCH_SIZE),
                    num_rows=span.count(registry.ROWS),
                    committed_len=span.count(registry.COMMITTED_LEN),
                    num_tested=span.count(registry.NUM_TESTED),
                    num_accepted=span.count(registry.NUM_ACCEPTED),
                    num_stale=span.count(registry.NUM_STALE),
                    wait_seconds=span.seconds(registry.PROPOSAL_WAIT),
                    tokens=made[0],
                    rejected=made[1],
                    chains=tuple(consumed),
                    num_unresolved=len(span.links) - len(consumed),
                )
            )
        return tuple(rounds)

    def _attempt(self, index: int, peer: Peer) -> Attempt:
        session, sequence = peer.session, peer.sequence
        prefill = next((s for s in peer.spans if s.name.endswith(".prefill")), None)
        return Attempt(
            index=index,
            session=self._bar(session) if session else None,
            sequence=self._bar(sequence, peer.shift) if sequence else None,
            prefill=self._bar(prefill, peer.shift) if prefill else None,
            num_prefilled=prefill.count(registry.NUM_TOKENS) if prefill else 0,
            address=session.text(registry.PEER) if session else "",
            reason=session.text(registry.REOPEN) if session else "",
            num_summed=sequence.count(registry.SUMMED) if sequence else 0,
            lost=peer.lost,
            shifted_seconds=peer.shift / 1e9,
        )

    def _parts(self) -> tuple[tuple[str, float], ...]:
        sequences = [p.sequence for p in self._targets if p.sequence]
        parts = []
        for name, attribute in _PARTS.items():
            seconds = (self._root or _ABSENT).seconds(attribute)
            if seconds is None and name in PARTS[:3]:
                known = [s for q in sequences if (s := q.seconds(attribute)) is not None]
                seconds = sum(known) if known else None
            if seconds is not None:
                parts.append((name, max(0.0, seconds)))
        return tuple(parts)

    def _figures(self, rounds: Sequence[Round]) -> Figures:
        sequences = [p.sequence for p in self._targets if p.sequence]
        root = self._root or _ABSENT

        def total(attribute: registry.Attribute, in_rounds: int) -> int:
            told = root.number(attribute)
            if told is not None:
                return told
            known = [n for q in sequences if (n := q.number(attribute)) is not None]
            return sum(known) if known else in_rounds

        in_rounds = sum(len(r.tokens) for r in rounds)
        tokens = root.attributes.get("gen_ai.usage.output_tokens")
        prompt = root.attributes.get("gen_ai.usage.input_tokens")
        tokens = tokens if isinstance(tokens, int) else in_rounds
        discarded = root.count(registry.NUM_DISCARDED)
        delivered = root.number(registry.NUM_DELIVERED)
        return Figures(
            tokens=tokens,
            delivered=tokens - discarded if delivered is None else delivered,
            discarded=discarded,
            prompt=prompt if isinstance(prompt, int) else 0,
            cached=sum(q.count(registry.NUM_CACHED) for q in sequences),
            steps=total(registry.NUM_STEPS, len(rounds)),
            undrafted_steps=total(registry.NUM_UNDRAFTED, sum(r.num_tested == 0 for r in rounds)),
            drafted=total(registry.NUM_DRAFTED, 0),
            tested=total(registry.NUM_TESTED, sum(r.num_tested for r in rounds)),
            accepted=total(registry.NUM_ACCEPTED, sum(r.num_accepted for r in rounds)),
            stale=total(registry.NUM_STALE, sum(r.num_stale for r in rounds)),
            preemptions=sum(q.count(registry.NUM_PREEMPTIONS) for q in sequences),
            summed=sum(q.count(registry.SUMMED) for q in sequences),
        )


def _round(
    span: Span, index: int, num_before: int, chains: Sequence[Chain]
) -> tuple[tuple[Token, ...], tuple[int | None, ...]]:
    """Tokens that were decided, and ids of draft tokens that were tested in vain."""
    begin = span.count(registry.COMMITTED_LEN)
    tested, accepted = span.count(registry.NUM_TESTED), span.count(registry.NUM_ACCEPTED)
    token_ids = span.ids(registry.TOKEN_IDS)
    origins = Verdict(0, begin, tested, accepted, token_ids).origins()
    tokens = tuple(
        Token(num_before + i, begin + i, token_id, origin, index)
        for i, (token_id, origin) in enumerate(zip(token_ids, origins, strict=True))
    )
    newest_first = sorted(chains, key=lambda c: (c.draft, c.serial), reverse=True)
    rejected = tuple(
        next((i for c in newest_first if (i := c.token_at(position)) is not None), None)
        for position in range(begin + accepted, begin + tested)
    )
    return tokens, rejected


def _outcome(root: Span | None) -> tuple[Outcome, str]:
    if root is None:
        return Outcome.RUNNING, ""
    reason = root.text(registry.FINISH_REASON).lower().removeprefix("finish_reason_")
    reason = reason.replace("_", " ")
    if reason:  # a client may hang up on the last event
        return Outcome.FINISHED, reason
    if root.has_event("tandem.deadline"):
        return Outcome.DEADLINE, root.message
    if root.has_event("tandem.cancelled"):
        return Outcome.CANCELLED, root.message
    if root.failed:
        return Outcome.FAILED, root.message
    return Outcome.FINISHED, ""


def _per_position(rounds: Sequence[Round]) -> tuple[tuple[int, int], ...]:
    longest = max((r.num_tested for r in rounds), default=0)
    return tuple(
        (sum(r.num_tested > i for r in rounds), sum(r.num_accepted > i for r in rounds))
        for i in range(longest)
    )
